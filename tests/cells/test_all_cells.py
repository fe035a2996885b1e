"""An operator of one cell sees what all cells have to do, and finds a job or a tenant in any of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from leasehold.api.console.session import COOKIE
from leasehold.domain.errors import BadSetting
from leasehold.file_secrets import FileSecret
from leasehold.security import other_cells
from leasehold.security.cells import Cells
from leasehold.security.credentials import create_key
from leasehold.security.other_cells import CellKeys, open_other_cells
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of, serving
from tests.cells.conftest import Cell, Two, replace_file
from tests.cells.test_move import moved, rows_of, submit
from tests.console.conftest import HTML

OPERATOR = ("fleet:operate", "jobs:read", "runs:read")


async def operator(cell: Cell, scopes: tuple[str, ...] = OPERATOR) -> str:
    connection = await asyncpg.connect(cell.database_url)
    try:
        made = await create_key(connection, tenant_id="ops", client_id="ops", scopes=scopes, cell=cell.name)
        return made.text
    finally:
        await connection.close()


def give_keys(running: Running, path: Path, **keys: str) -> None:
    """The file of keys from which the cell asks the others."""
    replace_file(path, keys)
    others = running.services.other_cells
    assert others is not None
    if not isinstance(others._keys._secret, FileSecret):
        others._keys = CellKeys(FileSecret(path))


@dataclass
class Asked:
    """Cell `a` with keys for both, and clients of its operator."""

    two: Two
    keys_file: Path
    keys: dict[str, str]
    api: httpx2.AsyncClient
    browser: httpx2.AsyncClient

    async def cells(self) -> dict[str, dict[str, Any]]:
        answer = await self.api.get("/v1/cells")
        assert answer.status_code == 200, answer.text
        return {row["cell"]: row for row in answer.json()["cells"]}

    async def find(self, **query: str) -> Any:
        answer = await self.api.get("/v1/cells/find", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def page(self, query: str = "") -> str:
        answer = await self.browser.get(f"/console/cells{query}")
        assert answer.status_code == 200, answer.text
        return answer.text


def answer_within(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """So long do the cells wait for each other. On a busy machine one may stand still for seconds."""
    monkeypatch.setattr(other_cells, "LIMIT_SECONDS", seconds)
    monkeypatch.setattr(other_cells.ask, "__defaults__", (seconds,))


@pytest.fixture
async def asked(two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asked]:
    answer_within(60.0, monkeypatch)
    keys = {cell.name: await operator(cell) for cell in (two.a, two.b)}
    give_keys(two.a.running, tmp_path / "keys.json", **keys)
    async with (
        client_of(two.a.running.url, keys["a"]) as api,
        httpx2.AsyncClient(base_url=two.a.running.url, headers=HTML, timeout=30) as browser,
    ):
        assert (await browser.post("/console/sign-in", data={"key": keys["a"]})).status_code == 303
        yield Asked(two, tmp_path / "keys.json", keys, api, browser)


async def test_one_page_has_what_each_cell_has_to_do(asked: Asked) -> None:
    two = asked.two
    two.place(acme="b", other="a")
    for _ in range(3):
        await submit(two.b.running.url, await two.b.key())
    cells = await asked.cells()
    assert {name: (row["own"], row["state"], row["because"], row["tenants_placed"]) for name, row in cells.items()} == {
        "a": (True, "ready", None, 1),
        "b": (False, "ready", None, 1),
    }
    load = cells["b"]["load"]
    assert (load["cell"], load["due"], load["has_more"], load["running"], load["failed"], load["tenants"]) == (
        "b", 3, False, 0, 0, 1,
    )  # fmt: skip
    assert load["oldest_seconds"] >= 0
    assert cells["a"]["load"]["due"] == 0
    assert cells["a"]["load"]["oldest_seconds"] is None
    assert cells["b"]["console"] == f"{two.b.running.url}/console"
    page = await asked.page()
    assert f'href="{two.b.running.url}/console/"' in page
    assert 'data-label="due">3<' in page


async def test_a_cell_counts_what_runs_and_what_has_failed_and_leaves_paused_queues_out(asked: Asked) -> None:
    cell = asked.two.b
    jobs = [await submit(cell.running.url, await cell.key()) for _ in range(3)]
    rows = await asyncpg.connect(cell.database_url)
    try:
        await rows.execute(
            "UPDATE task SET status = 'running', lease_owner = gen_random_uuid(), lease_until = 'infinity'"
            " WHERE job_id = $1", jobs[0],
        )  # fmt: skip
        await rows.execute(
            "UPDATE task SET status = 'failed', finished_at = clock_timestamp() WHERE job_id = $1", jobs[1]
        )
        load = (await asked.cells())["b"]["load"]
        assert (load["due"], load["running"], load["failed"]) == (1, 1, 1)
        await rows.execute(
            "INSERT INTO paused_queue (queue, reason) SELECT queue, 'x' FROM task WHERE job_id = $1", jobs[2]
        )
        async with client_of(cell.running.url, asked.keys["b"]) as client:
            own = (await client.get("/v1/cells/own")).json()
        assert (own["due"], own["oldest_seconds"]) == (0, None)
    finally:
        await rows.close()


async def test_a_job_is_found_in_its_cell_from_any_cell(asked: Asked) -> None:
    two = asked.two
    theirs = await submit(two.b.running.url, await two.b.key())
    ours = await submit(two.a.running.url, await two.a.key("here"))
    for job, cell, tenant in ((theirs, two.b, "acme"), (ours, two.a, "here")):
        link = f"{cell.running.url}/console/jobs/{job}"
        (found,) = (answer := await asked.find(job=job))["found"]
        assert (found["cell"], found["tenant"], found["link"], answer["silent"]) == (cell.name, tenant, link, [])
        assert f'href="{link}"' in await asked.page(f"?find={job}")
    assert await asked.find(job="01a204b8-0000-7000-8000-000000000000") == {"found": [], "silent": []}
    async with rows_of(two.b) as rows:  # of a job that was deleted today, and of somebody who has only signed in
        await rows.execute(
            "INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)"
            " VALUES ('01a204b8-0000-7000-8000-000000000001', 'acme', 'noop', true, 'deleted')"
        )
        await rows.execute(
            "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes)"
            " VALUES (gen_random_uuid(), 'people', 'https://id.example', 'vera', 'vera', 'Vera', '{role:viewer}')"
        )
    for query in ({"job": "01a204b8-0000-7000-8000-000000000001"}, {"tenant": "people"}):
        assert [found["cell"] for found in (await asked.find(**query))["found"]] == ["b"]
    assert "No cell has" in await asked.page("?find=01a204b8-0000-7000-8000-000000000000")


async def test_a_tenant_is_found_by_its_rows_and_by_the_map(asked: Asked) -> None:
    two = asked.two
    await two.b.key("unmapped")
    (found,) = (await asked.find(tenant="unmapped"))["found"]
    assert (found["cell"], found["link"]) == ("b", f"{two.b.running.url}/console/jobs?q=tenant%3Aunmapped")
    uuid = "01a204b8-0000-7000-8000-000000000002"
    await two.b.key(uuid)
    for name in ("unmapped", uuid):
        assert f'href="{two.b.running.url}/console/jobs?q=tenant%3A{name}"' in await asked.page(f"?find={name}")
    two.place(promised="b")
    (found,) = (await asked.find(tenant="promised"))["found"]  # no cell has a row of it yet
    assert (found["cell"], found["link"]) == ("b", None)
    name = 'with "quotes" & spaces'
    await two.b.key(name)
    (found,) = (await asked.find(tenant=name))["found"]
    q = quote('tenant:"with \\"quotes\\" & spaces"', safe="")
    assert (found["cell"], found["link"]) == ("b", f"{two.b.running.url}/console/jobs?q={q}")
    assert (await asked.find(tenant="nobody"))["found"] == []


async def test_a_moved_job_is_found_where_the_tenant_lives_now(asked: Asked) -> None:
    two = asked.two
    job = await submit(two.a.running.url, await two.a.key())
    await moved(two)
    two.place(acme="b")
    for query in ({"job": job}, {"tenant": "acme"}):
        new, old = (await asked.find(**query))["found"]
        assert (new["cell"], new["moved_to"], old["cell"], old["moved_to"]) == ("b", None, "a", "b")
    load = (await asked.cells())["a"]["load"]
    assert (load["tenants"], load["moving"]) == (0, 0)  # its rows are still there
    page = await asked.page(f"?find={job}")
    assert page.index("in cell b") < page.index("in cell a")


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """It accepts, and never answers."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _reader, writer: held.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        for writer in held:
            writer.close()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers each request with these bytes; and the heads of the requests."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(heads[-1]))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        await server.wait_closed()


def add_to_map(two: Two, **addresses: str) -> None:
    document = json.loads(two.a.path.read_text())
    document["cells"] |= addresses
    replace_file(two.a.path, document)


async def test_a_silent_cell_is_shown_as_silent_and_nobody_waits_for_it_twice(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it hold a connection to the database of the cell that asks."""
    monkeypatch.setattr("leasehold.security.other_cells._SHARED_SECONDS", 0.0)
    job = await submit(asked.two.b.running.url, await asked.two.b.key())
    async with silent_server() as address:
        add_to_map(asked.two, c=address)
        give_keys(asked.two.a.running, asked.keys_file, **asked.keys, c=asked.keys["a"])
        for seconds in (2.0, 8.0, 30.0):
            answer_within(seconds, monkeypatch)
            first = await asked.cells()
            if first["b"]["load"] is not None:  # else it had no processor for so long
                break
        answer_within(60.0, monkeypatch)
        assert {name: row["state"] for name, row in first.items()} == {"a": "ready", "b": "ready", "c": "silent"}
        assert (first["b"]["load"]["due"], first["c"]["load"], first["c"]["because"]) == (1, None, None)
        others = asked.two.a.running.services.other_cells
        assert others is not None
        asking_again = asyncio.create_task(others.status())
        done, _ = await asyncio.wait([asking_again], timeout=30)
        assert [answer.state for answer in done.pop().result()] == ["ready", "silent"]
        request = next(one for (cell, _), one in others._requests.items() if cell == "c")
        assert not request.task.done()  # it was asked again, and the answer did not wait for it
        assert (
            asked.two.a.running.services.pool._pool.get_idle_size()
            == asked.two.a.running.services.pool._pool.get_size()
        )
        assert (await asked.find(job=job))["found"][0]["cell"] == "b"
        for seconds in (2.0, 8.0, 30.0):
            answer_within(seconds, monkeypatch)
            found = await asked.find(tenant="nobody")
            if found["silent"] == ["c"]:
                break
        assert found == {"found": [], "silent": ["c"]}
        answer_within(60.0, monkeypatch)
        assert "silent" in await asked.page()


async def test_a_cell_without_a_key_with_a_wrong_key_or_with_another_name_is_shown_as_such(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.security.other_cells._SHARED_SECONDS", 0.0)
    running = asked.two.a.running
    for key, because in (
        (None, "no_key"),
        (await asked.two.b.key(), "key_refused"),  # no operator's
        (asked.keys["a"], "key_refused"),  # of another cell
    ):
        give_keys(running, asked.keys_file, **({} if key is None else {"b": key}))
        row = (await asked.cells())["b"]
        assert (row["state"], row["load"], row["because"]) == ("ready", None, because)
    give_keys(running, asked.keys_file, **asked.keys)
    assert (await asked.cells())["b"]["because"] is None  # the file was read again
    add_to_map(asked.two, c=asked.two.b.running.url)
    give_keys(running, asked.keys_file, **asked.keys, c=asked.keys["b"])
    assert (await asked.cells())["c"]["because"] == "another_cell"
    asked.keys_file.write_text("{")
    assert (await asked.cells())["b"]["because"] is None  # the last keys stay in force


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000,
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_whatever_another_cell_answers_the_page_shows_the_others(
    asked: Asked, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_cells, "_SHARED_SECONDS", 600.0)  # the page asks for no second answer
    async with answering(lambda _head: answer) as (address, heads):
        add_to_map(asked.two, c=address)
        give_keys(asked.two.a.running, asked.keys_file, **asked.keys, c=asked.keys["a"])
        cells = await asked.cells()
        assert cells["b"]["load"]["due"] == 0
        assert (cells["c"]["load"], cells["c"]["console"]) == (None, None)
        assert (await asked.find(tenant="nobody")) == {"found": [], "silent": ["c"]}
        await asked.page()
    assert len(heads) == 3  # no redirect was followed
    assert not any(asked.keys["b"].encode() in head for head in heads)


async def test_a_console_of_another_cell_cannot_be_any_address(asked: Asked) -> None:
    """Only a path comes from the other cell: the host is the map's."""
    load = (await asked.cells())["b"]["load"]
    for console in ("@evil.example", "//evil.example", "/a b", "javascript:alert(1)", "/a/../../b"):
        body = json.dumps(load | {"cell": "c", "console": console}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)

        def told(_head: bytes, text: bytes = head + body) -> bytes:
            return text

        async with answering(told) as (address, _heads):
            add_to_map(asked.two, c=address)
            give_keys(asked.two.a.running, asked.keys_file, **asked.keys, c=asked.keys["a"])
            row = (await asked.cells())["c"]
            assert (row["because"], row["console"]) == ("not_understood", None)
            assert "evil" not in await asked.page()


@pytest.mark.parametrize("member", ["workers", "due", "running", "failed", "tenants", "moving", "oldest_seconds"])
async def test_a_number_of_another_cell_that_no_answer_can_have_hides_no_other_cell(asked: Asked, member: str) -> None:
    """JSON has numbers of any size, and an answer of this API has integers of 64 bits."""
    load = (await asked.cells())["b"]["load"]
    body = json.dumps(load | {"cell": "c", member: 10**400}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with answering(lambda _head: head + body) as (address, _heads):
        add_to_map(asked.two, c=address)
        give_keys(asked.two.a.running, asked.keys_file, **asked.keys, c=asked.keys["a"])
        cells = await asked.cells()
        assert cells["b"]["load"] == load
        assert (cells["c"]["load"], cells["c"]["because"]) == (None, "not_understood")
        await asked.page()


async def test_no_key_reaches_the_browser_or_the_answer(asked: Asked) -> None:
    texts = [await asked.page(), await asked.page("?find=acme"), (await asked.api.get("/v1/cells")).text]
    secrets = [key[-43:] for key in asked.keys.values()]
    assert not any(secret in text for text in texts for secret in secrets)
    assert COOKIE in asked.browser.cookies


async def test_only_operators_see_the_cells(two: Two) -> None:
    key = await two.a.key()
    paths = ("/v1/cells", "/v1/cells/own", "/v1/cells/find?tenant=acme", "/v1/cells/own/find?tenant=acme")
    async with client_of(two.a.running.url, key) as client:
        for path in paths:
            assert (await client.get(path)).status_code == 403
    async with httpx2.AsyncClient(base_url=two.a.running.url, headers=HTML, timeout=30) as browser:
        assert (await browser.post("/console/sign-in", data={"key": key})).status_code == 303
        assert (await browser.get("/console/cells")).status_code == 403
        assert "/console/cells" not in (await browser.get("/console/")).text


async def test_a_search_names_one_of_a_job_and_a_tenant(asked: Asked) -> None:
    both = {"job": "01a204b8-0000-7000-8000-000000000000", "tenant": "acme"}
    wrong = {"job_or_tenant": ({}, both), "invalid_request": ({"job": "no-id"}, {"tenant": ""})}
    for path in ("/v1/cells/find", "/v1/cells/own/find"):
        for code, queries in wrong.items():
            for query in queries:
                answer = await asked.api.get(path, params=query)
                assert (answer.status_code, answer.json()["code"]) == (422, code)


async def test_an_installation_without_a_map_has_no_such_page(settings: Settings, two: Two) -> None:
    key = await operator(two.a)
    changes: dict[str, Any] = {"database_url": SecretStr(two.a.database_url)}
    changes["sealing_keys"] = two.a.running.services.settings.sealing_keys
    async with serving(settings.model_copy(update=changes)) as running:
        async with client_of(running.url, key) as client:
            for path in ("/v1/cells", "/v1/cells/own", "/v1/cells/find?tenant=x", "/v1/cells/own/find?tenant=x"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["code"]) == (404, "no_cells")
        async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=30) as browser:
            assert (await browser.post("/console/sign-in", data={"key": key})).status_code == 303
            assert (await browser.get("/console/cells")).status_code == 404
            assert "/console/cells" not in (await browser.get("/console/")).text


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": "hidden"}', '{"a": "lh_a_x\\r\\nX: hidden"}'])
async def test_keys_that_cannot_be_read_refuse_the_start_and_are_not_shown(two: Two, text: str) -> None:
    changed = two.a.running.services.settings.model_copy(update={"cells_keys": SecretStr(text)})
    with pytest.raises(BadSetting, match="LEASEHOLD_CELLS_KEYS") as refused:
        await open_other_cells(changed, Cells.of(changed)).__aenter__()
    assert "hidden" not in str(refused.value)
