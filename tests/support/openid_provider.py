"""A real OpenID provider for the tests of people: Canaille, with people and groups in memory, on a port of loopback."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from joserfc.jwk import RSAKey
from werkzeug.serving import WSGIRequestHandler, make_server

CLIENT_ID, CLIENT_SECRET, PASSWORD = "leasehold", "the client's secret: 100%", "correct horse battery"
_TOKEN = re.compile(r'name="csrf_token" value="([^"]+)"')


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@dataclass
class Provider:
    """`issuer`: its URL. `paths`: the paths of all requests so far."""

    issuer: str
    app: Any
    paths: list[str] = field(default_factory=list)

    def client(self, redirect_uri: str) -> None:
        """Let an installation be a client: its callback is at `redirect_uri`."""
        from canaille.app import models  # noqa: PLC0415 - as below
        from canaille.backends import Backend  # noqa: PLC0415

        with self.app.app_context():
            backend = Backend.instance
            client = backend.get(models.Client, client_id=CLIENT_ID) or models.Client(client_id=CLIENT_ID)
            backend.update(
                client,
                client_secret=CLIENT_SECRET,
                client_name="Leasehold",
                client_uri=redirect_uri,
                redirect_uris=[redirect_uri],
                grant_types=["authorization_code"],
                response_types=["code"],
                scope=["openid", "profile", "email", "groups"],
                token_endpoint_auth_method="client_secret_basic",
            )
            backend.save(client)
            backend.update(client, audience=[client])
            backend.save(client)

    def person(self, name: str, *groups: str, email: str | None = None, family_name: str = "Example") -> None:
        """Somebody with the password PASSWORD, in these groups and no other."""
        from canaille.app import models  # noqa: PLC0415 - as below
        from canaille.backends import Backend  # noqa: PLC0415

        with self.app.app_context():
            backend = Backend.instance
            user = backend.get(models.User, user_name=name) or models.User(user_name=name)
            backend.update(
                user, given_name=name, family_name=family_name, formatted_name=f"{name} {family_name}",
                emails=[email or f"{name}@example.org"], password=PASSWORD,
            )  # fmt: skip
            backend.save(user)
            for group in backend.query(models.Group):
                if user in group.members and group.display_name not in groups:
                    backend.update(group, members=[member for member in group.members if member != user])
                    backend.save(group)
            for wanted in groups:
                group = backend.get(models.Group, display_name=wanted) or models.Group(display_name=wanted, members=[])
                if user not in group.members:
                    backend.update(group, members=[*group.members, user])
                    backend.save(group)

    def new_key(self) -> None:
        """From now on sign with another key, and publish that one alone."""
        self.app.config["CANAILLE_OIDC"]["ACTIVE_JWKS"] = [_key()]


def _key() -> dict[str, Any]:
    key = RSAKey.generate_key(2048)
    key.ensure_kid()
    return dict(key.as_dict(private=True))


@contextmanager
def providing() -> Iterator[Provider]:
    os.environ["AUTHLIB_INSECURE_TRANSPORT"] = "1"  # it speaks plain HTTP, on loopback alone
    from canaille import create_app  # noqa: PLC0415 - importing takes a second, for these tests alone

    _mend_queries()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    app = create_app(
        config={
            "SECRET_KEY": "x" * 32,
            "PREFERRED_URL_SCHEME": "http",
            "SERVER_NAME": address,
            "CANAILLE": {
                "DATABASE": "memory",
                "JAVASCRIPT": False,
                "ACL": {"DEFAULT": {"PERMISSIONS": ["use_oidc"]}},
                "LOGGING": {"version": 1, "disable_existing_loggers": False},
            },
            "CANAILLE_OIDC": {"ACTIVE_JWKS": [_key()], "TRUSTED_DOMAINS": ["127.0.0.1"]},  # asks for no consent
        },
        env_file=None,
    )
    provider = Provider(f"http://{address}", app)
    app.before_request(lambda: _note(provider))
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=_Quiet)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _mend_queries() -> None:
    """In memory, Canaille 0.3.6 finds what fits any of a query's conditions: another code of the same client, too."""
    from canaille.backends.memory.backend import MemoryBackend, listify  # noqa: PLC0415 - as above

    find_any = MemoryBackend.do_query
    if find_any.__module__ == __name__:
        return

    def find_all(self: Any, model: Any, *args: Any, **conditions: Any) -> list[Any]:
        def fits(found: Any) -> bool:
            return all(
                set(map(str, model.serialize(listify(value)))) & set(map(str, listify(found._state.get(name))))
                for name, value in conditions.items()
            )

        return [found for found in find_any(self, model, *args, **conditions) if fits(found)]

    MemoryBackend.do_query = find_all


def _note(provider: Provider) -> None:
    from flask import request  # noqa: PLC0415 - as above

    provider.paths.append(request.path)


async def sign_in_at(provider: Provider, address: str, name: str) -> str:
    """As a browser that the API has sent to `address`: sign in with a name and a password. The address that the
    provider sends the browser back to.
    """
    async with httpx2.AsyncClient(timeout=30) as browser:
        answer = await browser.get(address)
        for _ in range(8):
            if answer.is_redirect:
                following = str(answer.url.join(answer.headers["location"]))
                if not following.startswith(provider.issuer):
                    return following
                answer = await browser.get(following)
                continue
            token = _TOKEN.search(answer.text)
            assert token is not None, answer.text
            answer = await browser.post(
                str(answer.url), data={"csrf_token": token[1], "login": name, "password": PASSWORD}
            )
    raise AssertionError(f"no way back: {answer.url} {answer.status_code}")


def query_of(address: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(urlsplit(address).query).items()}
