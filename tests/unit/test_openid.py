"""What an OpenID provider's configuration may leave out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import pytest
from pydantic import SecretStr

from leasehold.security.egress import Answer
from leasehold.security.openid import Flow, OpenId
from leasehold.settings import Settings


class Provider:
    """Answers each request with a token, in place of Egress."""

    def __init__(self) -> None:
        self.requests: list[tuple[Mapping[str, str], bytes]] = []

    async def request(self, _method: str, _url: str, *, headers: Any, content: bytes, **_limits: Any) -> Answer:
        self.requests.append((headers, content))
        return Answer(HTTPStatus.OK, {}, b'{"id_token": "t"}')


BASIC = f"Basic {base64.b64encode(b'console:secret').decode()}"


@pytest.mark.parametrize(
    ("methods", "authorization"),
    [
        ({}, BASIC),
        ({"token_endpoint_auth_methods_supported": None}, BASIC),
        ({"token_endpoint_auth_methods_supported": "client_secret_post"}, BASIC),  # no list: as if it were left out
        ({"token_endpoint_auth_methods_supported": ["client_secret_basic", "other"]}, BASIC),
        ({"token_endpoint_auth_methods_supported": ["client_secret_post"]}, None),
    ],
)
async def test_the_client_authenticates_as_the_provider_can(methods: Any, authorization: str | None) -> None:
    settings = Settings(
        _env_file=None, console_oidc_client_id="console", console_oidc_client_secret=SecretStr("secret")
    )
    provider: Any = Provider()
    client = OpenId(settings, "https://idp.example", provider)
    configuration = {"token_endpoint": "https://idp.example/token", **methods}
    tokens = await client._exchange(configuration, Flow.new(), "https://console.example/back", "code")
    ((headers, content),) = provider.requests
    assert tokens == {"id_token": "t"}
    assert headers.get("Authorization") == authorization
    assert (b"client_secret=secret" in content) == (authorization is None)
