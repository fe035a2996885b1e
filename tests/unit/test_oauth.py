"""The access token for the file service: how long it is used, and which answers of the token endpoint are none."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import orjson
import pytest
from pydantic import SecretStr

from leasehold.domain.errors import BadGateway
from leasehold.security.egress import Answer, EgressFailed, EgressRefused
from leasehold.security.oauth import Client, Tokens
from leasehold.settings import Settings


class Endpoint:
    """In the place of egress: gives the tokens t1, t2 ..., by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 200, **fields: Any) -> None:
        self.now = 1000.0
        self.forms: list[dict[str, list[str]]] = []
        self.authorizations: list[str] = []
        self._status, self._fields = status, fields
        monkeypatch.setattr("leasehold.security.oauth.monotonic", lambda: self.now)

    async def request(self, _method: str, _url: str, *, headers: Any, content: bytes, **_limits: Any) -> Answer:
        self.forms.append(parse_qs(content.decode()))
        self.authorizations.append(headers["Authorization"])
        fields = {"access_token": f"t{len(self.forms)}"} | self._fields  # without a type it is a bearer's
        return Answer(self._status, {}, orjson.dumps(fields))


def tokens(endpoint: object, scope: str = "") -> Tokens:
    egress: Any = endpoint
    return Tokens(egress, Client("https://id.example/token", "us", SecretStr("secret"), scope))


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"expires_in": 3600}, 3570),
        ({"expires_in": 90.5}, 60.5),
        ({"expires_in": 10}, 1),  # so short that it is used at least for a moment
        ({}, 270),
        ({"expires_in": "3600"}, 270),
    ],
)
async def test_a_token_is_used_until_shortly_before_its_end_and_then_renewed(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], seconds: float
) -> None:
    endpoint = Endpoint(monkeypatch, **fields)
    client = tokens(endpoint)
    endpoint.now = 0.0
    assert await client.token() == "t1"
    endpoint.now = seconds - 0.25
    assert await client.token() == "t1"
    endpoint.now = seconds
    assert await client.token() == "t2"
    client.forget()  # the service refused it
    assert await client.token() == "t3"
    assert await client.token() == "t3"


@pytest.mark.parametrize("scope", ["", "files:write files:delete"])
async def test_the_request_names_the_client_and_the_scope_that_is_configured(
    monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    endpoint = Endpoint(monkeypatch)
    await tokens(endpoint, scope).token()
    assert endpoint.forms == [{"grant_type": ["client_credentials"]} | ({"scope": [scope]} if scope else {})]
    assert endpoint.authorizations == ["Basic dXM6c2VjcmV0"]


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (201, {}),
        (401, {}),
        (200, {"access_token": ""}),
        (200, {"access_token": None}),
        (200, {"access_token": 7}),
        (200, {"access_token": ["t"]}),
        (200, {"access_token": "a\r\nX: y"}),
        (200, {"access_token": "t\u00f6ken"}),
        (200, {"token_type": "mac"}),
        (200, {"token_type": None}),
    ],
)
async def test_what_is_no_token_is_sent_nowhere_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, status: int, fields: dict[str, Any]
) -> None:
    endpoint = Endpoint(monkeypatch, status, **fields)
    client = tokens(endpoint)
    for _ in range(2):
        with pytest.raises(BadGateway) as refused:
            await client.token()
        assert refused.value.code == "token_refused"
    assert len(endpoint.forms) == 2


@pytest.mark.parametrize("error", [EgressFailed("no answer"), EgressRefused("address_private", "Not public.")])
async def test_a_token_endpoint_that_does_not_answer_is_named_as_such(error: Exception) -> None:
    class Silent:
        async def request(self, *_arguments: object, **_more: object) -> Answer:
            raise error

    with pytest.raises(BadGateway) as refused:
        await tokens(Silent()).token()
    assert refused.value.code == "token_endpoint_unavailable"


def test_promotions_need_a_token_only_where_an_endpoint_is_configured() -> None:
    settings = Settings(_env_file=None)
    assert Client.of_promotions(settings) is None
    named = settings.model_copy(update={
        "promote_token_url": "https://id.example/token", "promote_client_id": "us",
        "promote_client_secret": SecretStr("secret"), "promote_scope": "files",
    })  # fmt: skip
    assert Client.of_promotions(named) == Client("https://id.example/token", "us", SecretStr("secret"), "files")
