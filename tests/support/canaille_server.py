"""The program that tests/support/openid_provider.py starts: Canaille on a loopback port, with people in memory.

It writes its issuer as the first line. Then it reads commands, one JSON line each, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

os.environ["AUTHLIB_INSECURE_TRANSPORT"] = "1"  # it speaks plain HTTP, but only on loopback

from canaille import create_app
from canaille.app import models
from canaille.backends import Backend
from canaille.backends.memory.backend import MemoryBackend, listify
from joserfc.jwk import RSAKey
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.support.openid_provider import CLIENT_ID, CLIENT_SECRET, PASSWORD


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


_find_any = MemoryBackend.do_query


def _find_all(self: Any, model: Any, *args: Any, **conditions: Any) -> list[Any]:
    """The rows that fit all conditions of a query. Canaille 0.3.6 itself returns rows that fit any of them, so also
    another code of the same client.
    """

    def fits(row: Any) -> bool:
        return all(
            set(map(str, model.serialize(listify(value)))) & set(map(str, listify(row._state.get(name))))
            for name, value in conditions.items()
        )

    return [row for row in _find_any(self, model, *args, **conditions) if fits(row)]


def client(redirect_uri: str) -> None:
    backend = Backend.instance
    registered = backend.get(models.Client, client_id=CLIENT_ID) or models.Client(client_id=CLIENT_ID)
    backend.update(
        registered,
        client_secret=CLIENT_SECRET,
        client_name="Leasehold",
        client_uri=redirect_uri,
        redirect_uris=[redirect_uri],
        grant_types=["authorization_code"],
        response_types=["code"],
        scope=["openid", "profile", "email", "groups"],
        token_endpoint_auth_method="client_secret_basic",
    )
    backend.save(registered)
    backend.update(registered, audience=[registered])
    backend.save(registered)


def person(name: str, groups: list[str], family_name: str) -> None:
    backend = Backend.instance
    user = backend.get(models.User, user_name=name) or models.User(user_name=name)
    backend.update(
        user, given_name=name, family_name=family_name, formatted_name=f"{name} {family_name}",
        emails=[f"{name}@example.org"], password=PASSWORD,
    )  # fmt: skip
    backend.save(user)
    for group in backend.query(models.Group):
        if user in group.members and group.display_name not in groups:
            backend.update(group, members=[member for member in group.members if member != user])
            backend.save(group)
    for group_name in groups:
        group = backend.get(models.Group, display_name=group_name) or models.Group(display_name=group_name, members=[])
        if user not in group.members:
            backend.update(group, members=[*group.members, user])
            backend.save(group)


def key() -> dict[str, Any]:
    signing_key = RSAKey.generate_key(2048)
    signing_key.ensure_kid()
    return dict(signing_key.as_dict(private=True))


def answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
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
            "CANAILLE_OIDC": {"ACTIVE_JWKS": [key()], "TRUSTED_DOMAINS": ["127.0.0.1"]},  # asks for no consent
        },
        env_file=None,
    )
    MemoryBackend.do_query = _find_all
    paths: list[str] = []
    verbs: dict[str, Callable[..., None]] = {"client": client, "person": person}

    def count() -> None:
        paths.append("")

    app.before_request(count)
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=_Quiet, fd=listening.fileno())
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    answer(f"http://{address}")
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        with app.app_context():
            if verb == "new_key":
                app.config["CANAILLE_OIDC"]["ACTIVE_JWKS"] = [key()]
            elif verb != "requests":
                verbs[verb](*arguments)
        answer(len(paths))


if __name__ == "__main__":
    main()
