"""Starts a real OpenID provider for the tests of people: Canaille, with people and groups in memory, on loopback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2

CLIENT_ID, CLIENT_SECRET, PASSWORD = "leasehold", "the client's secret: 100%", "correct horse battery"
_TOKEN = re.compile(r'name="csrf_token" value="([^"]+)"')


class Provider:
    """The provider. It runs in a process of its own: so Flask, its logging and its threads stay out of the tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.issuer = str(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the OpenID provider has ended"
        return json.loads(line)

    def _ask(self, verb: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def requests(self) -> int:
        """The number of requests that the provider has received."""
        return int(self._ask("requests"))

    def client(self, redirect_uri: str) -> None:
        """Register an installation as the client. Its callback is at `redirect_uri`."""
        self._ask("client", redirect_uri)

    def person(self, name: str, *groups: str, family_name: str = "Example") -> None:
        """Write a person with the password PASSWORD, who is in these groups and no others."""
        self._ask("person", name, groups, family_name)

    def new_key(self) -> None:
        """From now on sign with a new key, and publish only the new key."""
        self._ask("new_key")


@contextmanager
def providing() -> Iterator[Provider]:
    command = [sys.executable, "-m", __name__.replace("openid_provider", "canaille_server")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Provider(process)
        finally:
            process.terminate()


async def sign_in_at(provider: Provider, address: str, name: str) -> str:
    """Sign in with a name and the password, as a browser that the API has redirected to `address`. Returns the address
    to which the provider redirects the browser.
    """
    async with httpx2.AsyncClient(timeout=60) as browser:
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
    raise AssertionError(f"the provider does not redirect back: {answer.url} {answer.status_code}")


def query_of(address: str) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(urlsplit(address).query).items()}
