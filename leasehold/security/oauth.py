"""Fetches the access token with which the platform sends requests to another service. It uses the client credentials of
OAuth 2.0 (RFC 6749, 4.4).

Promotions use it. A promotion copies a finished model to the HTTP file service from which an installation serves its
models.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from urllib.parse import quote, urlencode

import structlog
from pydantic import SecretStr

from leasehold.domain.errors import BadGateway
from leasehold.security.egress import Answer, Egress, EgressFailed, EgressRefused
from leasehold.settings import Settings

log = structlog.get_logger(__name__)

_TIMEOUT_SECONDS = 15.0  # the longest time that one request may take
#: A token is renewed this many seconds before it expires.
_EARLY_SECONDS = 30.0
#: The lifetime in seconds of a token whose answer has no `expires_in`.
_DEFAULT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Client:
    """The token endpoint, and the platform's credentials there."""

    url: str
    id: str
    secret: SecretStr
    scope: str

    @classmethod
    def of_promotions(cls, settings: Settings) -> Client | None:
        """The client that the `promote_*` settings describe. Returns None if the settings name no token endpoint."""
        if settings.promote_token_url is None:
            return None
        return cls(
            settings.promote_token_url, settings.promote_client_id, settings.promote_client_secret,
            settings.promote_scope,
        )  # fmt: skip


class Tokens:
    """The access token of one client. `egress`: the HTTP client for requests to other services. The method `token`
    fetches it at the first call, and again shortly before it expires or after `forget`.
    """

    def __init__(self, egress: Egress, client: Client) -> None:
        self._egress = egress
        self._client = client
        self._token = ""
        self._renew_at = 0.0

    async def token(self) -> str:
        """A valid token. Raises BadGateway `token_refused` or `token_endpoint_unavailable`."""
        if monotonic() >= self._renew_at:
            await self._fetch()
        return self._token

    def forget(self) -> None:
        """Drop the token, because the service refused it. The next call of `token` fetches a new token."""
        self._renew_at = 0.0

    async def _fetch(self) -> None:
        requested_at = monotonic()
        answer = await self._request_token()
        fields = answer.json_object() if answer.status == HTTPStatus.OK else {}
        token, scheme = fields.get("access_token"), str(fields.get("token_type", "bearer")).lower()
        # The token becomes part of a header, which may have only ASCII (RFC 6750, 2.1).
        is_printable = isinstance(token, str) and token.isascii() and token.isprintable()
        if not token or not is_printable or scheme != "bearer":
            log.warning("the token endpoint gave no token", status=answer.status)
            raise BadGateway("token_refused", "The token endpoint gave no token.")
        expires_in = fields.get("expires_in")
        seconds = float(expires_in) if isinstance(expires_in, (int, float)) else _DEFAULT_SECONDS
        self._token, self._renew_at = token, requested_at + max(seconds - _EARLY_SECONDS, 1.0)

    async def _request_token(self) -> Answer:
        form = {"grant_type": "client_credentials"} | ({"scope": self._client.scope} if self._client.scope else {})
        credentials = f"{quote(self._client.id, safe='')}:{quote(self._client.secret.get_secret_value(), safe='')}"
        headers = {
            "Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        try:
            return await self._egress.request(
                "POST", self._client.url, headers=headers, content=urlencode(form).encode(), timeout=_TIMEOUT_SECONDS
            )
        except EgressRefused as error:  # an operator must mend the settings
            log.warning("a request to the token endpoint is forbidden", code=error.code)
            raise BadGateway("token_endpoint_unavailable", "The token endpoint cannot be asked.") from error
        except EgressFailed as error:
            log.warning("the token endpoint did not answer", error=type(error).__name__)
            raise BadGateway("token_endpoint_unavailable", "The token endpoint does not answer.") from error
