"""The clients ask no proxy for a server of this machine, for example for a `leasehold dev`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from leasehold import ExternalWorker
from leasehold.app.http_link import ApiAccess, HttpLink
from leasehold.cli.api_client import ApiClient
from leasehold.client import AsyncClient, Client

CLIENTS: dict[str, Callable[[str], httpx2.Client]] = {
    "the command line": lambda url: ApiClient(url, "lh_key")._http,
    "a client": lambda url: Client(url, "lh_key")._http,
    "a client, from the store": lambda url: Client(url, "lh_key")._store,
}
ASYNC_CLIENTS: dict[str, Callable[[str], httpx2.AsyncClient]] = {
    "a client": lambda url: AsyncClient(url, "lh_key")._http,
    "a client, from the store": lambda url: AsyncClient(url, "lh_key")._store,
    "an external worker": lambda url: ExternalWorker(url, "lh_key", queues=["q"])._http,
    "an external worker, from the store": lambda url: ExternalWorker(url, "lh_key", queues=["q"])._store,
}


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """A proxy is asked for a whole URL, a server for a path."""
        self.send_response(403 if self.path.startswith("http://") else 204)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server. The environment names it as the proxy for everything, too."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, address)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield address
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_goes_to_this_machine_directly(url: str, client: str) -> None:
    with CLIENTS[client](url) as http:
        assert http.get(f"{url}/v1/jobs").status_code == 204


@pytest.mark.parametrize("client", ASYNC_CLIENTS)
async def test_a_client_with_a_loop_goes_to_this_machine_directly(url: str, client: str) -> None:
    async with ASYNC_CLIENTS[client](url) as http:
        assert (await http.get(f"{url}/v1/jobs")).status_code == 204


async def test_what_is_elsewhere_is_asked_of_the_proxy(url: str) -> None:
    assert Client("http://jobs.example", "lh_key")._http.get("/v1/jobs").status_code == 403
    assert (await AsyncClient("http://jobs.example", "lh_key")._http.get("/v1/jobs")).status_code == 403


async def test_an_app_over_http_reads_its_results_from_this_machine_directly(url: str) -> None:
    async with HttpLink.opened(ApiAccess(url, "lh_key")) as link:
        assert (await link._store.get(f"{url}/bucket/key")).status_code == 204
