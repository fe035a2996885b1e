"""`console`: what each page costs the server and the database beside so many jobs, what a page weighs, and what many
open consoles cost.
"""

from __future__ import annotations

import asyncio
import os
import re
from time import perf_counter

import asyncpg
import httpx2
from cryptography.fernet import Fernet

from bench import surface
from bench.figure import Figure, Goal, quantile
from bench.http import Connection, until_ready
from bench.processes import cpu_seconds, main_processes_of, tree
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.api.console.overview import REFRESH_SECONDS
from leasehold.db.database import connected
from leasehold.embedded.ports import free_port
from leasehold.security.credentials import create_key

_PAGE_MS, _ROWS, _WEIGHT = Goal(100.0), Goal(5000), Goal(150)
_CPU, _QUESTIONS = Goal(5.0), Goal(1.0)
_TIMES = 30
_CONSOLES, _EVERY_SECONDS, _WINDOW_SECONDS = 200, float(REFRESH_SECONDS), 60.0
_TENANT = "acme"
#: `{job}`: a job that has failed.
_PAGES = (
    "/", "/jobs", "/jobs?q=status:failed+tenant:acme", "/jobs?q=kind:media+created:<1h",
    "/jobs?q=timeout+tenant:acme", "/jobs/{job}",
    "/dead-letters", "/operations", "/queues", "/workers", "/schedules", "/templates", "/webhooks", "/limits", "/keys",
)  # fmt: skip
_ASSET = re.compile(r'(?:src|href)="([^"]+/assets/[^"]+)"')
_MARK = re.compile(rb"(?i)x-console-mark: (\w+)")
_KB = 1000


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    jobs = max(scale.finished)
    async with testbed.installation(broker="postgres", sealing_keys=Fernet.generate_key().decode()) as installation:
        await surface.fill(installation, jobs)
        await testbed.checkpoint()
        port = free_port()
        await installation.start("api", api_port=port, metrics=False)  # the exporter reads, too, and not for a page
        await until_ready(port)
        async with installation.connection() as connection, httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"Accept": "text/html"}, timeout=60
        ) as person:  # fmt: skip
            key = await _sign_in(installation, person)
            job = await connection.fetchval("SELECT id FROM job WHERE error IS NOT NULL ORDER BY id DESC LIMIT 1")
            figures = []
            for path in _PAGES:
                figures += await _of_page(connection, person, path.format(job=job), path, jobs, scale.runs)
            figures.append(await _weight(person))
            return figures + await _of_consoles(connection, person, key, port)


async def _sign_in(installation: Installation, person: httpx2.AsyncClient) -> str:
    """As an operator of all tenants, who sees the most. Returns the key."""
    async with connected(installation.settings, "bench") as connection:
        key = await create_key(connection, tenant_id=_TENANT, client_id="bench", scopes=["role:admin", "fleet:operate"])
    answer = await person.post("/console/sign-in", data={"key": key.text})
    if answer.status_code != httpx2.codes.SEE_OTHER:
        raise RuntimeError(f"the sign-in was answered {answer.status_code}")
    return key.text


async def _of_page(
    connection: asyncpg.Connection[asyncpg.Record],
    person: httpx2.AsyncClient,
    path: str,
    name: str,
    jobs: int,
    runs: int,
) -> list[Figure]:
    """Rows: of one request that finds nothing in the API's memory; time: of all that follow."""
    await _forget_statistics(connection)
    before = await _rows_read(connection)
    await _get(person, path)
    await _forget_statistics(connection)
    rows = await _rows_read(connection) - before
    load, worst = [], []
    for _ in range(runs):
        load.append(os.getloadavg()[0])
        spent = []
        for _ in range(_TIMES):
            began = perf_counter()
            await _get(person, path)
            spent.append(1000 * (perf_counter() - began))
        worst.append(quantile(spent, 0.95))
    what = f"the console's page `{name}` beside {jobs:,} jobs"
    return [
        Figure(f"{what}, p95", "ms", tuple(worst), tuple(load), _PAGE_MS),
        Figure(f"{what}, rows read", "rows", (float(rows),), tuple(load[:1]), _ROWS),
    ]


async def _get(person: httpx2.AsyncClient, path: str) -> httpx2.Response:
    answer = await person.get(f"/console{path}")
    if answer.status_code != httpx2.codes.OK:
        raise RuntimeError(f"{path} was answered {answer.status_code}")
    return answer


async def _forget_statistics(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """A session of the API reports what it read once it ends: end all of them, and the API opens new ones."""
    await connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'leasehold api%'"
    )
    await asyncio.sleep(0.3)
    await connection.execute("SELECT pg_stat_clear_snapshot()")


async def _rows_read(connection: asyncpg.Connection[asyncpg.Record]) -> int:
    """Rows of tables that were read one after another, or fetched by an index."""
    return int(
        await connection.fetchval(
            "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables"
        )
    )


async def _weight(person: httpx2.AsyncClient) -> Figure:
    """The heaviest page with all that it asks for, as it goes over the wire to a browser that has none of it."""
    pages = [await _get(person, path) for path in ("/", "/jobs")]
    weights = []
    for answer in pages:
        assets = [await person.get(url) for url in sorted(set(_ASSET.findall(answer.text)))]
        weights.append(sum(int(one.headers["content-length"]) for one in (answer, *assets)))
    name = "the console's heaviest page, with all that it asks for"
    return Figure(name, "kB", (max(weights) / _KB,), (os.getloadavg()[0],), _WEIGHT)


async def _of_consoles(
    connection: asyncpg.Connection[asyncpg.Record], person: httpx2.AsyncClient, key: str, port: int
) -> list[Figure]:
    """Overviews that refresh as browsers do, less what an API without visitors costs."""
    idle = await _costs(connection)
    sessions = [await _cookies_of(person, key) for _ in range(_CONSOLES)]
    consoles = [asyncio.create_task(_console(cookies, port, nth)) for nth, cookies in enumerate(sessions)]
    try:
        await asyncio.sleep(2 * _EVERY_SECONDS)  # until each shows its page
        load = os.getloadavg()[0]
        busy = await _costs(connection)
    finally:
        for console in consoles:
            console.cancel()
        ended = await asyncio.gather(*consoles, return_exceptions=True)
    if broken := [one for one in ended if not isinstance(one, asyncio.CancelledError)]:
        raise RuntimeError(f"{len(broken)} consoles broke off: {broken[0]!r}")
    name = f"{_CONSOLES} open consoles (Overview)"
    return [
        Figure(f"{name}: CPU of the API", "% of a core", (max(busy[0] - idle[0], 0.0),), (load,), _CPU),
        Figure(f"{name}: transactions of the database", "1/s", (max(busy[1] - idle[1], 0.0),), (load,), _QUESTIONS),
    ]


def _refresh(cookies: str, mark: str) -> bytes:
    lines = [
        "GET /console/ HTTP/1.1", "Host: 127.0.0.1", "Accept: text/html", "HX-Request: true", f"Cookie: {cookies}",
        f"X-Console-Mark: {mark}", "Content-Length: 0",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


async def _cookies_of(person: httpx2.AsyncClient, key: str) -> str:
    """A session of its own."""
    signed_in = await person.post("/console/sign-in", data={"key": key})
    return "; ".join(f"{name}={value}" for name, value in signed_in.cookies.items())


async def _console(cookies: str, port: int, nth: int) -> None:
    """As a browser does, it asks by the mark of the page that it shows."""
    await asyncio.sleep(_EVERY_SECONDS * nth / _CONSOLES)
    connection, mark = await Connection.open(port), ""
    while True:
        status, _, head = await connection.send_for_head(_refresh(cookies, mark))
        if status not in (httpx2.codes.OK, httpx2.codes.NO_CONTENT):
            raise RuntimeError(f"a refresh was answered {status}")
        found = _MARK.search(head)
        mark = found[1].decode() if found is not None else mark
        await asyncio.sleep(_EVERY_SECONDS)


async def _costs(connection: asyncpg.Connection[asyncpg.Record]) -> tuple[float, float]:
    """Per cent of a core, and transactions a second, for a while."""
    (api,) = main_processes_of("api")
    await _forget_statistics(connection)
    cpu, questions = _cpu(api), await _transactions(connection)
    await asyncio.sleep(_WINDOW_SECONDS)
    spent = 100 * (_cpu(api) - cpu) / _WINDOW_SECONDS
    await _forget_statistics(connection)
    return spent, (await _transactions(connection) - questions) / _WINDOW_SECONDS


def _cpu(pid: int) -> float:
    return sum(cpu_seconds(each) for each in tree(pid))


async def _transactions(connection: asyncpg.Connection[asyncpg.Record]) -> int:
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return int(
        await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
    )
