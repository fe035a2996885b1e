"""Promotion by OAuth client credentials, against a double of the token endpoint over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

import orjson
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from leasehold.db.database import Connection
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, client_of, serving
from tests.security.test_promote import ONE, SCOPES, TWO, Tenant, at, code
from tests.support.file_service import FileService, serving_files
from tests.support.http_server import serving_http

SECRET = "a/secret with: odd characters"


@dataclass
class TokenEndpoint:
    url: str = ""
    answer: tuple[int, Any] = (200, {"access_token": "t1", "token_type": "Bearer", "expires_in": 3600})
    asked: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    endpoint: TokenEndpoint

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.endpoint.asked.append((self.headers["Authorization"], form))
        status, said = self.endpoint.answer
        body = said if isinstance(said, bytes) else orjson.dumps(said)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_said: object) -> None:
        return


@contextmanager
def token_endpoint() -> Iterator[TokenEndpoint]:
    endpoint = TokenEndpoint()
    with serving_http(_Handler, endpoint=endpoint) as url:
        endpoint.url = f"{url}/oauth/token"
        yield endpoint


@pytest.fixture
def endpoint() -> Iterator[TokenEndpoint]:
    with token_endpoint() as opened:
        yield opened


@pytest.fixture
def file_service() -> Iterator[FileService]:
    with serving_files() as service:
        yield service


def by_oauth(settings: Settings, service: FileService, endpoint: TokenEndpoint) -> Settings:
    return at(settings, service).model_copy(
        update={
            "promote_token": SecretStr(""),
            "promote_token_url": endpoint.url,
            "promote_client_id": "leasehold",
            "promote_client_secret": SecretStr(SECRET),
            "promote_scope": "files:write files:delete",
        }
    )


async def test_artifacts_are_promoted_with_a_token_for_client_credentials(
    settings: Settings, rows: Connection, make_key: MakeKey, file_service: FileService, endpoint: TokenEndpoint
) -> None:
    with capture_logs() as lines:
        async with (
            serving(by_oauth(settings, file_service, endpoint)) as running,
            client_of(running.url, (await make_key("acme", SCOPES)).text) as client,
        ):
            acme = Tenant(client, rows, running.services.store)
            assert (await acme.promote(await acme.convert(b"model"), TWO)).status_code == 200
    assert file_service.tokens == {"Bearer t1"}
    ((authorization, form),) = endpoint.asked
    named = base64.b64decode(authorization.removeprefix("Basic ")).decode()
    assert named == "leasehold:a%2Fsecret%20with%3A%20odd%20characters"
    assert form == {"grant_type": ["client_credentials"], "scope": ["files:write files:delete"]}
    assert "t1" not in [value for line in lines for value in line.values()]
    assert SECRET not in str(lines)


async def test_a_token_that_was_revoked_is_replaced_once(
    settings: Settings, rows: Connection, make_key: MakeKey, file_service: FileService, endpoint: TokenEndpoint
) -> None:
    file_service.accepts = lambda token: token == "Bearer t2"
    tokens = iter(["t1", "t2", "t3"])

    answers = {"token_type": "bearer", "expires_in": 3600}
    original = _Handler.do_POST

    def do_post(self: _Handler) -> None:
        endpoint.answer = (200, answers | {"access_token": next(tokens)})
        original(self)

    _Handler.do_POST = do_post  # type: ignore[method-assign]  # a token a request
    try:
        async with (
            serving(by_oauth(settings, file_service, endpoint)) as running,
            client_of(running.url, (await make_key("acme", SCOPES)).text) as client,
        ):
            acme = Tenant(client, rows, running.services.store)
            assert (await acme.promote(await acme.convert(b"model"), ONE)).status_code == 200
    finally:
        _Handler.do_POST = original  # type: ignore[method-assign]  # as it was
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [
        (401, {"error": "invalid_client"}),
        (200, b"no json"),
        (200, {"token_type": "Bearer"}),
        (200, {"access_token": "bad\r\nX: y", "token_type": "Bearer"}),
        (200, {"access_token": "t\u00f6ken", "token_type": "Bearer"}),  # no header can hold it
        (200, {"access_token": "t", "token_type": "mac"}),
        (500, {}),
    ],
)
async def test_without_a_token_nothing_is_promoted_and_nothing_is_told_of_the_secret(
    settings: Settings,
    rows: Connection,
    make_key: MakeKey,
    file_service: FileService,
    endpoint: TokenEndpoint,
    answer: tuple[int, Any],
) -> None:
    endpoint.answer = answer
    async with (
        serving(by_oauth(settings, file_service, endpoint)) as running,
        client_of(running.url, (await make_key("acme", SCOPES)).text) as client,
    ):
        acme = Tenant(client, rows, running.services.store)
        refused = await acme.promote(await acme.convert(b"model"), ONE)
    assert code(refused) == (502, "token_refused")
    assert SECRET not in refused.text
    assert file_service.files == {}
    assert await rows.fetchval("SELECT count(*) FROM promoted_object") == 0
