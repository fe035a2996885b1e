"""Asks the other cells (installations, each of which has a part of the tenants) for their load, or whether they have a
certain job or tenant. All cells are asked at once. Also makes this cell's own answer about its load.

Addresses come only from the operator's map, and keys only from the setting `cells_keys`. The key of a cell goes only to
the address of that cell. So redirects are not followed, and no proxy of the environment is used. This module reads only
the known fields of an answer, and checks their values. No function here holds a connection to the database or a lock
while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, Literal, TypeAlias
from urllib.parse import urlencode
from uuid import UUID

import httpx2
import orjson
import structlog
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from leasehold.domain.errors import BadSetting
from leasehold.runtime.holding import check_nothing_held
from leasehold.security.cells import CELL, CellMap, Cells
from leasehold.security.credentials import parse_key
from leasehold.settings import Settings

log = structlog.get_logger(__name__)

#: Seconds in which a cell must answer. The console waits for the answer.
LIMIT_SECONDS = 2.0
#: For this many seconds, all requests to this process get the same answer of a cell.
_SHARED_SECONDS = 2.0
_MAX_BYTES = 64 * 1024
#: The largest count that is accepted from a cell. There must be a bound, because this API could not write a count
#: beyond 64 bits into its own answer.
_MAX_COUNT = 2**53 - 1
#: The endpoints that each cell has for the other cells. OWN_PATH answers with the load of the cell. FIND_PATH answers
#: whether the cell has a job or a tenant.
OWN_PATH, FIND_PATH = "/v1/cells/own", "/v1/cells/own/find"


class CellLoad(BaseModel):
    """The load of a cell, as the cell reports it. `due`: tasks that could start now. `has_more`: there may be more due
    tasks than were counted. `oldest_seconds`: how long the oldest due task has waited. `failed`: steps that failed for
    good within the last hour. `tenants`: tenants with jobs. `moving`: tenants on their way to another cell. `version`:
    the version of the API. `versions`: the versions of the workers. `console`: the path of the console; null: the cell
    has no console.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    cell: str = Field(pattern=rf"^{CELL.pattern}$")
    version: str = Field(max_length=100)
    versions: list[str] = Field(max_length=1000)
    workers: int = Field(ge=0, le=_MAX_COUNT)
    due: int = Field(ge=0, le=_MAX_COUNT)
    has_more: bool
    oldest_seconds: float | None = Field(ge=0, allow_inf_nan=False)
    running: int = Field(ge=0, le=_MAX_COUNT)
    failed: int = Field(ge=0, le=_MAX_COUNT)
    tenants: int = Field(ge=0, le=_MAX_COUNT)
    moving: int = Field(ge=0, le=_MAX_COUNT)
    console: str | None = Field(pattern=r"^(/[a-z0-9][a-z0-9_-]{0,62}){1,3}$")


class CellHolding(BaseModel):
    """Whether a cell has the job or the tenant. `moved_to`: the cell to which the tenant has moved. The rows in the
    answering cell are then out of date.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    found: bool
    tenant: str | None = Field(None, max_length=200)
    moved_to: str | None = Field(None, pattern=rf"^{CELL.pattern}$")
    console: str | None = Field(None, pattern=r"^(/[a-z0-9][a-z0-9_-]{0,62}){1,3}$")


State: TypeAlias = Literal["ready", "not_ready", "silent"]
#: Why another cell has not reported its load, although it answers. `no_key`: this cell has no key for the other cell.
#: `key_refused`: the other cell refused the key. `not_understood`: this cell cannot read the other cell's answer, or
#: got no whole answer in time. `another_cell`: the other cell has another name than the map says.
Because: TypeAlias = Literal["no_key", "key_refused", "not_understood", "another_cell"]


@dataclass(frozen=True, slots=True)
class CellAnswer:
    """What this cell knows of another cell. `state`: `ready` or `not_ready`, as the other cell reports it; `silent`: it
    did not answer. `load`: its load, or None. `because`: why it has not reported its load although it answers; None if
    it has reported the load, or if it is silent. `seconds`: how long it took to answer.
    """

    cell: str
    address: str
    state: State
    load: CellLoad | None
    because: Because | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """A cell that has the job or the tenant, or to which the map assigns the tenant. `tenant`: the tenant of the job,
    or the tenant that was searched. `moved_to`: as in CellHolding. `console`: the path of the cell's console; None: the
    cell has no console, or the path is not known.
    """

    cell: str
    address: str
    tenant: str | None
    moved_to: str | None
    console: str | None


class CellKeys:
    """The API keys with which this cell asks the other cells. If the setting names a file, a changed file is read
    again. While the file has no valid keys, the last valid keys stay in force.
    """

    def __init__(self, secret: SecretStr) -> None:
        """Raises ValueError if the keys cannot be read. The error's text shows no key."""
        self._secret = secret
        self._text = secret.get_secret_value()
        self._keys = parse_keys(self._text)

    def of(self, cell: str) -> str | None:
        """The key for the cell, or None."""
        text = self._secret.get_secret_value()  # reads a changed file
        if text != self._text:
            self._text = text
            try:
                self._keys = parse_keys(text)
            except ValueError as error:
                log.warning("the keys of the cells cannot be read: the last keys stay in force", error=str(error))
        return self._keys.get(cell)


def parse_keys(text: str) -> dict[str, str]:
    """The key of each cell, for example `{"b": "lh_b_..."}`. An empty text has no keys. Raises ValueError. The text of
    the error shows no key.
    """
    if not text:
        return {}
    try:
        keys = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ValueError("the keys of the cells are not JSON") from None
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise ValueError("the keys of the cells are not a JSON object that maps each cell to its key")
    for cell, key in keys.items():
        if not CELL.fullmatch(cell):  # the error does not show the name, because it may be a key in the wrong place
            raise ValueError("the keys of the cells have a name that no cell can have")
        if parse_key(key) is None:
            raise ValueError(f"the key of cell {cell} does not have the form of a key")
    return keys


@asynccontextmanager
async def open_http() -> AsyncIterator[httpx2.AsyncClient]:
    """A client that follows no redirect and uses no proxy. Like a browser, it sends a cookie back only to the host that
    has set the cookie.
    """
    async with httpx2.AsyncClient(
        timeout=None,
        follow_redirects=False,
        trust_env=False,
        headers={"Accept": "application/json", "User-Agent": "leasehold"},
    ) as http:
        yield http


async def ask(
    http: httpx2.AsyncClient, cell: str, address: str, key: str | None, seconds: float = LIMIT_SECONDS
) -> CellAnswer:
    """Ask a cell whether it is ready and, with a key, what its load is. If the cell does not answer, or sends an answer
    of another form, this function does not raise: `state` and `because` give the reason.
    """
    began = monotonic()
    readiness, response = await asyncio.gather(
        _get(http, f"{address}/readyz", None, seconds),
        _get(http, f"{address}{OWN_PATH}", key, seconds) if key is not None else _no_response(),
    )
    load, because = _load_of(cell, response, has_key=key is not None)
    seconds = round(monotonic() - began, 3)
    if readiness is None and response is None:
        return CellAnswer(cell, address, "silent", load, None, seconds)
    is_ready = readiness is not None and readiness[0] == HTTPStatus.OK
    return CellAnswer(cell, address, "ready" if is_ready else "not_ready", load, because, seconds)


#: The HTTP status and the body of an answer, or None if no whole answer came in time.
_Response: TypeAlias = tuple[int, bytes] | None


# The load in a response, and None. If the response has no usable load: None, and the reason.
def _load_of(cell: str, response: _Response, *, has_key: bool) -> tuple[CellLoad | None, Because | None]:
    if not has_key:
        return None, "no_key"
    if response is None:
        return None, "not_understood"
    status, body = response
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.MISDIRECTED_REQUEST):
        return None, "key_refused"
    try:
        load = CellLoad.model_validate_json(body) if status == HTTPStatus.OK else None
    except ValidationError:
        load = None
    if load is None:
        return None, "not_understood"
    return (load, None) if load.cell == cell else (None, "another_cell")


async def _no_response() -> _Response:
    return None


async def _get(http: httpx2.AsyncClient, url: str, key: str | None, seconds: float) -> _Response:
    """GET the URL. If the body of the answer is too long, the returned body is empty."""
    check_nothing_held("another cell")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with asyncio.timeout(seconds), http.stream("GET", url, headers=headers) as answer:
            body = b""
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > _MAX_BYTES:
                    return answer.status_code, b""
            return answer.status_code, body
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, OSError):
        return None


class OtherCells:
    """Asks the other cells, for this process of the API. The requests that come within `_SHARED_SECONDS` get the same
    answer of a cell. If a cell did not answer last time, this process asks it again, but no request waits for its
    answer.
    """

    def __init__(self, cells: Cells, keys: CellKeys, http: httpx2.AsyncClient) -> None:
        self.own = cells.own
        self._cells = cells
        self._keys = keys
        self._http = http
        self._requests: dict[tuple[str, str], _Request] = {}  # (cell, address) -> the latest request to it

    @property
    def map(self) -> CellMap:
        return self._cells.map

    async def status(self) -> list[CellAnswer]:
        """The answer of each other cell of the map, sorted by the cell's name. Waits at most LIMIT_SECONDS."""
        others = [(cell, address) for cell, address in sorted(self.map.addresses.items()) if cell != self.own]
        for removed in self._requests.keys() - set(others):  # the map has no such cell any more, or another address
            self._requests.pop(removed).task.cancel()
        requests = [self._current_request(cell, address) for cell, address in others]
        tasks = [request.task for request in requests if not request.was_silent]
        if tasks:
            await asyncio.wait(tasks)
        return [answer for request in requests if (answer := request.answer) is not None]

    def _current_request(self, cell: str, address: str) -> _Request:
        """The request to this cell, whose answer several requests to this API use. If there is no request to the cell
        yet, or if the latest request is over (`is_over`), this method begins a new request.
        """
        request = self._requests.get((cell, address))
        if request is not None and not request.is_over:
            return request
        # The context is empty, because the asyncio task may last longer than the API request that began it.
        task = asyncio.create_task(ask(self._http, cell, address, self._keys.of(cell)), context=Context())
        self._requests[cell, address] = _Request(task, None if request is None else request.answer)
        return self._requests[cell, address]

    async def find(self, *, job_id: UUID | None = None, tenant: str | None = None) -> tuple[list[Found], list[str]]:
        """Ask the other cells for the job or the tenant. Returns the cells that have it, and the names of silent cells.
        A cell counts as silent if it gave no usable answer, or if this cell has no key for it. The search ends when a
        cell has the job or the tenant, unless the tenant has moved away from that cell. Cells that have not answered by
        the end of the search are left out.
        """
        query = urlencode({"job": str(job_id)} if job_id is not None else {"tenant": tenant or ""})
        others = {cell: address for cell, address in self.map.addresses.items() if cell != self.own}
        cell_of_task = {
            asyncio.create_task(self._find_in(cell, address, query), context=Context()): cell
            for cell, address in others.items()
        }
        holders: list[Found] = []
        silent_cells: list[str] = []
        open_tasks = set(cell_of_task)
        try:
            while open_tasks and not any(holder.moved_to is None for holder in holders):
                done, open_tasks = await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    cell, holding = cell_of_task[task], task.result()
                    if holding is None:
                        silent_cells.append(cell)
                    elif holding.found:
                        holders.append(Found(cell, others[cell], holding.tenant, holding.moved_to, holding.console))
        finally:
            for task in open_tasks:
                task.cancel()
        return sorted(holders, key=lambda holder: (holder.moved_to is not None, holder.cell)), sorted(silent_cells)

    async def _find_in(self, cell: str, address: str, query: str) -> CellHolding | None:
        # None: this cell has no key for the other cell, or got no usable answer.
        key = self._keys.of(cell)
        if key is None:
            return None
        response = await _get(self._http, f"{address}{FIND_PATH}?{query}", key, LIMIT_SECONDS)
        try:
            if response is None or response[0] != HTTPStatus.OK:
                return None
            return CellHolding.model_validate_json(response[1])
        except ValidationError:
            return None

    async def close(self) -> None:
        tasks = [request.task for request in self._requests.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Request:
    """A request to one cell. Several requests to this API use its answer. `previous`: the cell's answer to the previous
    request; None: there was no previous request.
    """

    def __init__(self, task: asyncio.Task[CellAnswer], previous: CellAnswer | None) -> None:
        self.task = task
        self._previous = previous
        self._shared_until = monotonic() + _SHARED_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether the cell must be asked again."""
        return self.task.done() and monotonic() >= self._shared_until

    @property
    def was_silent(self) -> bool:
        """Whether the cell did not answer the previous request."""
        return self._previous is not None and self._previous.state == "silent"

    @property
    def answer(self) -> CellAnswer | None:
        """The cell's answer to this request or, until this answer comes, its answer to the previous request."""
        return self.task.result() if self.task.done() and not self.task.cancelled() else self._previous


@asynccontextmanager
async def open_other_cells(settings: Settings, cells: Cells | None) -> AsyncIterator[OtherCells | None]:
    """Yields the other cells, or None if the installation is not a cell. Raises BadSetting for keys that cannot be
    read.
    """
    if cells is None:
        yield None
        return
    try:
        keys = CellKeys(settings.cells_keys)
    except ValueError as error:
        raise BadSetting("LEASEHOLD_CELLS_KEYS", str(error)) from None
    async with open_http() as http:
        others = OtherCells(cells, keys, http)
        try:
            yield others
        finally:
            await others.close()


def answer_of_own(load: Mapping[str, Any], cell: str, version: str, console: str | None) -> CellLoad:
    """This cell's answer when another cell asks for its load. `load`: the row that `cell_reads.load` has read."""
    return CellLoad.model_validate({**load, "cell": cell, "version": version, "console": console})
