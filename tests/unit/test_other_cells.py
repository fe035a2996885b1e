"""What a cell asks the others, and what it makes of any answer, against servers that answer as the test lets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from pydantic import SecretStr

from leasehold.runtime.holding import ConnectionHeld, record_borrowed
from leasehold.security import other_cells
from leasehold.security.cells import Cells
from leasehold.security.other_cells import CellAnswer, OtherCells, ask, open_http, open_other_cells
from leasehold.settings import Settings

KEY = "lh_b_0123456789ab_" + "x" * 43
LOAD: Mapping[str, Any] = {
    "cell": "b", "version": "1", "versions": ["1"], "workers": 2, "due": 3, "has_more": False, "oldest_seconds": 1.5,
    "running": 4, "failed": 5, "tenants": 6, "moving": 7, "console": "/console",
}  # fmt: skip
READY, OWN, FIND = "/readyz", "/v1/cells/own", "/v1/cells/own/find"
SECONDS = 30.0
Said = tuple[int, bytes]


def own(**changes: Any) -> Said:
    return 200, json.dumps({**LOAD, **changes}).encode()


def holding(**members: Any) -> Said:
    return 200, json.dumps(members).encode()


class Neighbour:
    """A cell's server. `says`: path -> status and body; None: it hangs up. It is silent about all other paths."""

    def __init__(self, says: Mapping[str, Said | None]) -> None:
        self.says = dict(says)
        self.heads: list[str] = []
        self.url = ""
        self.open = 0  # connections
        self.was_left = asyncio.Event()  # by a client that closed its connection
        self.waits_for: asyncio.Event | None = None
        self.was_asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            self.was_asked.set()
            path = head.split(" ")[1].partition("?")[0]
            if path in self.says:
                said = self.says[path]
                if self.waits_for is not None:
                    await self.waits_for.wait()
                if said is None:
                    return
                status, body = said
                length = f"content-length: {len(body)}\r\nconnection: close\r\n"
                moved = f"location: {body.decode()}\r\n" if status == 302 else ""
                writer.write(f"HTTP/1.1 {status} Said\r\n{length}{moved}\r\n".encode() + body)
            await reader.read()
            self.was_left.set()
        except ConnectionError:
            self.was_left.set()
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def neighbour(says: Mapping[str, Said | None]) -> AsyncIterator[Neighbour]:
    made = Neighbour(says)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


async def asked(says: Mapping[str, Said | None], key: str | None = KEY) -> CellAnswer:
    async with neighbour(says) as cell, open_http() as http:
        return await ask(http, "b", cell.url, key, SECONDS)


async def understood(*changes: Mapping[str, Any]) -> list[bool]:
    """For each change of its load: whether the load that a cell reports is shown."""
    shown = []
    async with neighbour({READY: (200, b"")}) as cell, open_http() as http:
        for change in changes:
            cell.says[OWN] = own(**change)
            shown.append((await ask(http, "b", cell.url, KEY, SECONDS)).load is not None)
    return shown


def write_map(directory: Path, cells: Mapping[str, Neighbour]) -> Path:
    path, new = directory / "cells.json", directory / "new.json"
    addresses = {"a": "http://127.0.0.1:9", **{name: cell.url for name, cell in cells.items()}}
    new.write_text(json.dumps({"cells": addresses, "tenants": {}}))
    return new.replace(path)


@asynccontextmanager
async def others(
    directory: Path, **says: Mapping[str, Said | None]
) -> AsyncIterator[tuple[OtherCells, dict[str, Neighbour]]]:
    """The other cells of a cell `a`, and their servers."""
    async with AsyncExitStack() as stack:
        cells = {name: await stack.enter_async_context(neighbour(what)) for name, what in says.items()}
        path, keys = write_map(directory, cells), SecretStr(json.dumps(dict.fromkeys(cells, KEY)))
        settings = Settings(_env_file=None, cell="a", cells_file=str(path), cells_keys=keys)
        asking = await stack.enter_async_context(open_other_cells(settings, Cells.of(settings)))
        assert asking is not None
        yield asking, cells


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a server may stand still for seconds."""
    monkeypatch.setattr(other_cells, "LIMIT_SECONDS", 2 * SECONDS)
    monkeypatch.setattr(other_cells.ask, "__defaults__", (2 * SECONDS,))


def answers(status: Sequence[CellAnswer]) -> dict[str, tuple[str, str | None]]:
    return {answer.cell: (answer.state, answer.because) for answer in status}


@pytest.mark.parametrize(
    ("readiness", "load", "state", "because"),
    [
        ((200, b""), own(), "ready", None),
        ((503, b""), own(), "not_ready", None),
        (None, own(), "not_ready", None),
        ((503, b""), None, "not_ready", "not_understood"),
        (None, None, "silent", None),
    ],
)
async def test_a_cell_that_answers_anything_is_not_silent_and_one_that_is_not_ready_tells_its_load_all_the_same(
    readiness: Said | None, load: Said | None, state: str, because: str | None
) -> None:
    answer = await asked({READY: readiness, OWN: load})
    assert (answer.state, answer.because) == (state, because)
    assert (answer.load is not None) == (load is not None)


async def test_the_seconds_of_an_answer_are_those_from_the_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1000.0, 1001.23456))
    monkeypatch.setattr(other_cells, "monotonic", lambda: next(times))
    assert (await asked({READY: (200, b""), OWN: own()})).seconds == 1.235


async def test_a_count_may_be_as_large_as_every_reader_of_json_can_hold() -> None:
    members = ("workers", "due", "running", "failed", "tenants", "moving")
    assert await understood(dict.fromkeys(members, 2**53 - 1)) == [True]
    assert await understood(*({member: 2**53} for member in members)) == [False] * len(members)


async def test_an_answer_of_64_kib_is_read_and_a_longer_one_is_not() -> None:
    _, body = own()
    for size, because in ((64 * 1024, None), (64 * 1024 + 1, "not_understood")):
        answer = await asked({READY: (200, b""), OWN: (200, body.ljust(size))})
        assert (answer.state, answer.because) == ("ready", because)


async def test_a_load_of_another_form_is_not_guessed_at() -> None:
    bounds = ({"version": "v" * 100}, {"versions": ["1"] * 1000}, {"of_a_later_release": 1})
    wrong = ({"version": "v" * 101}, {"versions": ["1"] * 1001}, {"due": "3"}, {"has_more": 0}, {"due": 3.0})
    assert await understood(*bounds, *wrong) == [True] * len(bounds) + [False] * len(wrong)


async def test_a_key_goes_to_the_address_of_the_map_and_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to where the cell redirects to, nor to a proxy of the environment."""
    async with neighbour({READY: (200, b""), OWN: own()}) as elsewhere, neighbour({}) as cell:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        cell.says = {path: (302, f"{elsewhere.url}{path}".encode()) for path in (READY, OWN)}
        async with open_http() as http:
            answer = await ask(http, "b", cell.url, KEY, SECONDS)
    assert (answer.state, answer.because) == ("not_ready", "not_understood")
    assert sum(KEY in head for head in cell.heads) == 1
    assert elsewhere.heads == []


async def test_no_connection_to_the_database_is_held_while_another_cell_is_asked() -> None:
    borrowed: Any = SimpleNamespace(_con=object())

    async def ask_while_holding() -> CellAnswer:
        record_borrowed(borrowed)
        return await asked({READY: (200, b""), OWN: own()})

    with pytest.raises(ConnectionHeld):
        await asyncio.create_task(ask_while_holding())


async def test_a_search_ends_with_the_cell_that_has_the_tenant_and_asks_the_others_no_longer(tmp_path: Path) -> None:
    async with others(tmp_path, b={FIND: holding(found=True, tenant="acme")}, c={}) as (asking, cells):
        cells["b"].waits_for = cells["c"].was_asked
        async with asyncio.timeout(SECONDS):
            (holder,), silent = await asking.find(tenant="acme")
            await cells["c"].was_left.wait()
    assert (holder.cell, holder.tenant, silent) == ("b", "acme", [])


async def test_a_search_goes_on_after_a_cell_that_the_tenant_has_left_and_shows_that_cell_last(tmp_path: Path) -> None:
    left, here = holding(found=True, moved_to="c"), holding(found=True)
    async with others(tmp_path, b={FIND: left}, c={FIND: here}) as (asking, cells):
        cells["c"].waits_for = cells["b"].was_left
        holders, silent = await asking.find(job_id=uuid4())
    assert ([(holder.cell, holder.moved_to) for holder in holders], silent) == ([("c", None), ("b", "c")], [])


async def test_a_cell_whose_answer_to_a_search_is_no_such_answer_counts_as_silent(tmp_path: Path) -> None:
    said = {
        "b": holding(found=True, tenant="t" * 200, moved_to="a"),
        "c": holding(found=True, tenant="t" * 201),
        "d": holding(found="true"),
        "e": (500, holding(found=True)[1]),
        "f": holding(found=False),
    }
    async with others(tmp_path, **{name: {FIND: what} for name, what in said.items()}) as (asking, _cells):
        holders, silent = await asking.find(tenant="acme")
    assert ([holder.cell for holder in holders], silent) == (["b"], ["c", "d", "e"])


async def test_requests_share_an_answer_for_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(other_cells, "monotonic", lambda: now)
    async with others(tmp_path, b={READY: (200, b""), OWN: own()}) as (asking, cells):
        questions = []
        for now in (10.0, 11.9, 12.0, 13.9):  # noqa: B007 - the clock reads it
            assert answers(await asking.status()) == {"b": ("ready", None)}
            questions.append(len(cells["b"].heads))
    assert questions == [2, 2, 4, 4]


async def test_a_cell_that_has_not_answered_yet_is_not_asked_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its answer takes: else each page of the console would leave a request behind."""
    monkeypatch.setattr(other_cells, "_SHARED_SECONDS", 0.0)
    async with others(tmp_path, b={READY: (200, b""), OWN: own()}) as (asking, cells):
        both = await asyncio.gather(asking.status(), asking.status())
        assert [answers(status) for status in both] == [{"b": ("ready", None)}] * 2
        assert len(cells["b"].heads) == 2


async def test_a_cell_that_was_silent_is_asked_again_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_cells, "_SHARED_SECONDS", 0.0)
    async with others(tmp_path, b={READY: None, OWN: None}) as (asking, cells):
        assert answers(await asking.status()) == {"b": ("silent", None)}
        cells["b"].says.clear()
        cells["b"].was_asked.clear()
        for _ in range(2):
            async with asyncio.timeout(SECONDS):
                assert answers(await asking.status()) == {"b": ("silent", None)}
                await cells["b"].was_asked.wait()


async def test_a_cell_that_leaves_the_map_is_waited_for_no_longer(tmp_path: Path) -> None:
    async with others(tmp_path, b={READY: (200, b""), OWN: own()}, c={}) as (asking, cells), asyncio.timeout(SECONDS):
        waiting = asyncio.create_task(asking.status())
        await cells["c"].was_asked.wait()
        write_map(tmp_path, {"b": cells["b"]})
        assert answers(await asking.status()) == {"b": ("ready", None)}
        await cells["c"].was_left.wait()
        assert answers(await waiting) == {"b": ("ready", None)}


async def test_at_the_end_no_cell_is_asked_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_cells, "_SHARED_SECONDS", 0.0)

    async def question(asking: OtherCells, cell: Neighbour) -> asyncio.Task[Any]:
        waiting.append(asyncio.create_task(asking.status()))
        await cell.was_asked.wait()
        cell.was_asked.clear()
        (task,) = (task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") == "ask")
        return task

    waiting: list[asyncio.Task[Any]] = []
    async with asyncio.timeout(SECONDS):
        async with others(tmp_path, b={}) as (asking, cells):
            first = await question(asking, cells["b"])
            await asking.close()
            assert first.cancelled()
            await cells["b"].was_left.wait()
            last = await question(asking, cells["b"])
        assert last.cancelled()
        assert await asyncio.gather(*waiting) == [[], []]
