"""Signs people in at the installation's OpenID provider: the authorization code flow with PKCE (RFC 6749, 7636, 9207).

The console's sign-in calls this module. The module `id_tokens` checks signatures and claims. An Egress (an HTTP client
that refuses private addresses) sends all requests to the provider. Unlike the Egress of webhooks, this one may also
connect to the private networks that `console_oidc_networks` names, because the operator chose the provider.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, Self
from urllib.parse import quote, urlencode

import structlog

from leasehold.domain.errors import BadGateway, Unauthenticated
from leasehold.security.egress import Answer, Egress, EgressFailed, EgressRefused
from leasehold.settings import Membership, Settings

log = structlog.get_logger(__name__)

_TIMEOUT_SECONDS = 10.0  # for a request to the provider
_MAX_BYTES = 256 * 1024  # of an answer
#: Seconds for which the provider's configuration is used before it is read again.
_CONFIGURATION_SECONDS = 300.0
_MAX_TEXT_CHARACTERS = 200  # of a login or a name


@dataclass(frozen=True, slots=True)
class Flow:
    """A sign-in that has begun. The browser stores it, sealed, until the provider sends the browser back. `state`: the
    provider must send it back with the browser. `nonce`: the ID token must contain it. `verifier`: the secret of PKCE.
    The first request contains only its hash, the `challenge`.
    """

    state: str
    nonce: str
    verifier: str

    @classmethod
    def new(cls) -> Self:
        return cls(secrets.token_urlsafe(32), secrets.token_urlsafe(32), secrets.token_urlsafe(48))

    @property
    def challenge(self) -> str:
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Identity:
    """A person who has signed in. `subject`: the issuer's id of the person, which never changes. `login`: a name for
    people to read, which may change.
    """

    issuer: str
    subject: str
    login: str
    name: str
    groups: frozenset[str]


class OpenId:
    """The installation as a client of its OpenID provider."""

    def __init__(self, settings: Settings, issuer: str, egress: Egress) -> None:
        self.issuer = issuer
        self._settings = settings
        self._egress = egress
        self._configuration: dict[str, Any] = {}
        # the time, by `monotonic`, from which the configuration must be read again
        self._configuration_ends = 0.0

    @staticmethod
    def egress(settings: Settings) -> Egress:
        """An Egress for the provider alone. It may connect to public addresses and to `console_oidc_networks`."""
        networks = [text.strip() for text in settings.console_oidc_networks.split(",") if text.strip()]
        return Egress(tuple(ipaddress.ip_network(text) for text in networks))

    async def sign_in_url(self, flow: Flow, redirect_uri: str) -> str:
        """The URL of the provider at which the browser signs in. Raises BadGateway `openid_unavailable`."""
        endpoint = self._endpoint(await self._read_configuration(), "authorization_endpoint")
        query = {
            "response_type": "code",
            "client_id": self._settings.console_oidc_client_id,
            "redirect_uri": redirect_uri,
            "scope": self._settings.console_oidc_scopes,
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def identify(self, flow: Flow, redirect_uri: str, callback: Mapping[str, str]) -> Identity:
        """The person who has signed in. `callback`: the query parameters with which the provider sent the browser back.

        Raises Unauthenticated `sign_in_refused`, or BadGateway `openid_unavailable`.
        """
        if not hmac.compare_digest(callback.get("state", "").encode(), flow.state.encode()):
            raise _sign_in_refused("it belongs to another sign-in")
        configuration = await self._read_configuration()
        # RFC 9207: `iss` may be missing only if the provider does not promise to send it.
        must_name_issuer = configuration.get("authorization_response_iss_parameter_supported") is True
        if callback.get("iss", "" if must_name_issuer else self.issuer) != self.issuer:
            raise _sign_in_refused("it comes from another issuer")
        if "error" in callback or not callback.get("code"):
            log.info("the OpenID provider refused a sign-in", error=callback.get("error", "")[:60])
            raise Unauthenticated("sign_in_refused", "The provider did not sign you in.")
        tokens = await self._exchange(configuration, flow, redirect_uri, callback["code"])
        claims = await self._read_claims(configuration, flow, tokens.get("id_token"))
        groups_claim = self._settings.console_oidc_claim
        if groups_claim not in claims and isinstance(configuration.get("userinfo_endpoint"), str):
            # If both have a claim, that of the ID token counts.
            claims = await self._read_userinfo(configuration, tokens, str(claims["sub"])) | claims
        return _identity_of(self.issuer, claims, groups_claim)

    # Exchange the code of the callback for tokens. Returns the body of the provider's answer.
    async def _exchange(
        self, configuration: Mapping[str, Any], flow: Flow, redirect_uri: str, code: str
    ) -> dict[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": flow.verifier,
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        settings = self._settings
        client_id, secret = settings.console_oidc_client_id, settings.console_oidc_client_secret.get_secret_value()
        methods = configuration.get("token_endpoint_auth_methods_supported")
        # The installation authenticates itself by HTTP Basic, by the secret in the form, or, without a secret, not at
        # all.
        if not secret:
            form["client_id"] = client_id
        elif not isinstance(methods, list) or "client_secret_basic" in methods:  # basic is the default
            credentials = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
            headers["Authorization"] = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        else:
            form |= {"client_id": client_id, "client_secret": secret}
        endpoint = self._endpoint(configuration, "token_endpoint")
        answer = await self._request("POST", endpoint, headers, urlencode(form).encode())
        if answer.status == HTTPStatus.OK:
            return answer.json_object()
        error = _error_of(answer)
        log.warning("the OpenID provider gave no token", status=answer.status, error=error)
        if error == "invalid_grant":  # RFC 6749, 5.2: the only error that concerns this sign-in alone
            raise _sign_in_refused("the provider does not accept its code")
        raise _provider_unavailable(f"its token endpoint answered {answer.status}")

    async def _read_claims(self, configuration: Mapping[str, Any], flow: Flow, token: object) -> dict[str, Any]:
        """The claims of the ID token. Each sign-in reads the provider's keys again, because the provider may have
        withdrawn a key.
        """
        # `id_tokens` loads joserfc, which takes a tenth of a second. So only an installation with a provider loads it.
        from leasehold.security.id_tokens import TokenRefused, claims_of  # noqa: PLC0415 - as above

        answer = await self._request("GET", self._endpoint(configuration, "jwks_uri"), {"Accept": "application/json"})
        keys = answer.json_object().get("keys") if answer.status == HTTPStatus.OK else None
        if not isinstance(keys, list) or not keys:
            raise _provider_unavailable("it has no keys")
        client_id = self._settings.console_oidc_client_id
        try:
            return claims_of(token, keys, issuer=self.issuer, client_id=client_id, nonce=flow.nonce)
        except TokenRefused as error:
            raise _sign_in_refused(str(error)) from None

    async def _read_userinfo(
        self, configuration: Mapping[str, Any], tokens: Mapping[str, Any], subject: str
    ) -> dict[str, Any]:
        # Returns the claims of the provider's userinfo endpoint, which may have the groups if the ID token lacks them.
        headers = {"Authorization": f"Bearer {tokens.get('access_token', '')}", "Accept": "application/json"}
        answer = await self._request("GET", self._endpoint(configuration, "userinfo_endpoint"), headers)
        if answer.status != HTTPStatus.OK:
            raise _provider_unavailable(f"its userinfo endpoint answered {answer.status}")
        claims = answer.json_object()
        if claims.get("sub") != subject:
            raise _sign_in_refused("its userinfo is of somebody else")
        return claims

    # The provider's configuration (OpenID Connect Discovery), which is at most _CONFIGURATION_SECONDS old.
    async def _read_configuration(self) -> dict[str, Any]:
        if monotonic() >= self._configuration_ends:
            url = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
            answer = await self._request("GET", url, {"Accept": "application/json"})
            if answer.status != HTTPStatus.OK:
                raise _provider_unavailable(f"its configuration cannot be read: it answered {answer.status}")
            configuration = answer.json_object()
            if configuration.get("issuer") != self.issuer:
                raise _provider_unavailable("its configuration names another issuer")
            self._configuration, self._configuration_ends = configuration, monotonic() + _CONFIGURATION_SECONDS
        return self._configuration

    def _endpoint(self, configuration: Mapping[str, Any], name: str) -> str:
        """An endpoint of the configuration. The endpoint may use plain http only if the issuer's own URL does."""
        url = configuration.get(name)
        schemes = ("https://", "http://") if self.issuer.startswith("http://") else ("https://",)
        if not isinstance(url, str) or not url.startswith(schemes):
            raise _provider_unavailable(f"its configuration has no usable {name}")
        return url

    # Send a request to the provider. Raises BadGateway `openid_unavailable` if no answer comes.
    async def _request(self, method: str, url: str, headers: Mapping[str, str], content: bytes = b"") -> Answer:
        try:
            return await self._egress.request(
                method, url, headers=headers, content=content, max_bytes=_MAX_BYTES, timeout=_TIMEOUT_SECONDS
            )
        except (EgressRefused, EgressFailed) as error:
            raise _provider_unavailable(str(error)) from error


def memberships(settings: Settings, groups: frozenset[str]) -> dict[str, list[str]]:
    """The tenants of a person with these groups, each with the person's scopes there. A role is listed among the
    scopes, as `role:NAME`. In the setting `console_oidc_roles`, the group `*` stands for every person.
    """
    by_tenant: dict[str, list[str]] = {}
    for group, membership in settings.console_oidc_roles.items():
        if group == "*" or group in groups:
            by_tenant.setdefault(membership.tenant, []).extend(_scopes_of(membership))
    return {tenant: sorted(set(scopes)) for tenant, scopes in by_tenant.items()}


def _scopes_of(membership: Membership) -> list[str]:
    return [f"role:{membership.role}", *membership.scopes]


def _identity_of(issuer: str, claims: Mapping[str, Any], groups_claim: str) -> Identity:
    subject = claims["sub"]
    if not _printable_text(subject) or len(subject) > 255:  # noqa: PLR2004 - OpenID Connect Core, 2
        raise _sign_in_refused("the ID token has no usable subject")
    # The login is only displayed, so an email serves as the login unless the provider calls the email unverified.
    email = claims.get("email") if claims.get("email_verified", True) in (True, "true") else None
    login = _printable_text(email) or _printable_text(claims.get("preferred_username")) or _printable_text(subject)
    name = _printable_text(claims.get("name")) or login
    return Identity(issuer, subject, login, name, _groups_in(claims.get(groups_claim)))


def _groups_in(claim: object) -> frozenset[str]:
    """The groups of the claim. Some providers send a single group as a string."""
    groups = claim if isinstance(claim, list) else [claim]
    return frozenset(group for group in groups if isinstance(group, str))


def _printable_text(value: object) -> str:
    """The printable characters of the text, at most `_MAX_TEXT_CHARACTERS`. Empty if `value` is not a text."""
    if not isinstance(value, str):
        return ""
    return "".join(character for character in value if character.isprintable()).strip()[:_MAX_TEXT_CHARACTERS]


def _error_of(answer: Answer) -> str:
    """The code of an OAuth error. The error's description is left out, because it may quote the request."""
    return str(answer.json_object().get("error", ""))[:60]


def _sign_in_refused(why: str) -> Unauthenticated:
    return Unauthenticated("sign_in_refused", f"The provider's answer is not accepted: {why}. Begin again.")


def _provider_unavailable(why: str) -> BadGateway:
    log.warning("the OpenID provider cannot be used", reason=why)
    return BadGateway("openid_unavailable", "The OpenID provider does not answer as it should. Try again soon.")
