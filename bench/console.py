"""`console`: the time and the rows read of each page beside many jobs, the weight of a page, and the cost of many open
consoles.
"""

from __future__ import annotations

import asyncio
import os
import re
from time import perf_counter

import asyncpg
import httpx2

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
_CPU, _TRANSACTIONS = Goal(5.0), Goal(1.0)
_TIMES = 30
_CONSOLES, _EVERY_SECONDS, _WINDOW_SECONDS = 200, float(REFRESH_SECONDS), 60.0
_TENANT = "acme"
#: The measured pages. `{job}` becomes the id of a failed job.
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
    installation = await surface.filled(testbed, jobs)
    port = free_port()
    await installation.start("api", api_port=port, metrics=False)  # the exporter's reads would count as a page's
    await until_ready(port)
    async with installation.connection() as connection, httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers={"Accept": "text/html"}, timeout=60
    ) as browser:  # fmt: skip
        key = await _sign_in(installation, browser)
        job = await connection.fetchval("SELECT id FROM job WHERE error IS NOT NULL ORDER BY id DESC LIMIT 1")
        figures = []
        for path in _PAGES:
            figures += await _page_figures(connection, browser, path.format(job=job), path, jobs, scale.runs)
        figures.append(await _weight(browser))
        return figures + await _console_figures(connection, browser, key, port)


async def _sign_in(installation: Installation, browser: httpx2.AsyncClient) -> str:
    """Sign in as an operator of all tenants, who sees most. Returns the key."""
    async with connected(installation.settings, "bench") as connection:
        key = await create_key(connection, tenant_id=_TENANT, client_id="bench", scopes=["role:admin", "fleet:operate"])
    answer = await browser.post("/console/sign-in", data={"key": key.text})
    if answer.status_code != httpx2.codes.SEE_OTHER:
        raise RuntimeError(f"the sign-in was answered {answer.status_code}")
    return key.text


async def _page_figures(
    connection: asyncpg.Connection[asyncpg.Record],
    browser: httpx2.AsyncClient,
    path: str,
    name: str,
    jobs: int,
    runs: int,
) -> list[Figure]:
    """The time and the rows of a page. The rows are those of the first request, for which the API has nothing cached;
    the time is that of the later requests.
    """
    await _forget_statistics(connection)
    before = await _rows_read(connection)
    await _get(browser, path)
    await _forget_statistics(connection)
    rows = await _rows_read(connection) - before
    load, worst = [], []
    for _ in range(runs):
        load.append(os.getloadavg()[0])
        milliseconds = []
        for _ in range(_TIMES):
            began = perf_counter()
            await _get(browser, path)
            milliseconds.append(1000 * (perf_counter() - began))
        worst.append(quantile(milliseconds, 0.95))
    what = f"the console's page `{name}` beside {jobs:,} jobs"
    return [
        Figure(f"{what}, p95", "ms", tuple(worst), tuple(load), _PAGE_MS),
        Figure(f"{what}, rows read", "rows", (float(rows),), tuple(load[:1]), _ROWS),
    ]


async def _get(browser: httpx2.AsyncClient, path: str) -> httpx2.Response:
    answer = await browser.get(f"/console{path}")
    if answer.status_code != httpx2.codes.OK:
        raise RuntimeError(f"{path} was answered {answer.status_code}")
    return answer


async def _forget_statistics(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """End the sessions of the API: a session reports the rows that it has read when it ends. The API opens new
    sessions.
    """
    await connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'leasehold api%'"
    )
    await asyncio.sleep(0.3)
    await connection.execute("SELECT pg_stat_clear_snapshot()")


async def _rows_read(connection: asyncpg.Connection[asyncpg.Record]) -> int:
    """The rows of tables that all ended sessions have read, by sequential scans and by indexes."""
    return int(
        await connection.fetchval(
            "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables"
        )
    )


async def _weight(browser: httpx2.AsyncClient) -> Figure:
    """The bytes of the heaviest page with its assets, as sent to a browser with an empty cache: the assets packed by
    gzip, the page not.
    """
    pages = [await _get(browser, path) for path in ("/", "/jobs")]
    weights = []
    for answer in pages:
        assets = [await browser.get(url) for url in sorted(set(_ASSET.findall(answer.text)))]
        weights.append(sum(int(response.headers["content-length"]) for response in (answer, *assets)))
    name = "the console's heaviest page, with all that it asks for"
    return Figure(name, "kB", (max(weights) / _KB,), (os.getloadavg()[0],), _WEIGHT)


async def _console_figures(
    connection: asyncpg.Connection[asyncpg.Record], browser: httpx2.AsyncClient, key: str, port: int
) -> list[Figure]:
    """The cost of Overview pages that refresh as in browsers, minus the cost of an API without visitors."""
    idle = await _costs(connection)
    sessions = [await _cookies_of(browser, key) for _ in range(_CONSOLES)]
    consoles = [asyncio.create_task(_console(cookies, port, nth)) for nth, cookies in enumerate(sessions)]
    try:
        await asyncio.sleep(2 * _EVERY_SECONDS)  # by then each console shows its page
        load = os.getloadavg()[0]
        busy = await _costs(connection)
    finally:
        for console in consoles:
            console.cancel()
        outcomes = await asyncio.gather(*consoles, return_exceptions=True)
    if failures := [outcome for outcome in outcomes if not isinstance(outcome, asyncio.CancelledError)]:
        raise RuntimeError(f"{len(failures)} consoles broke off: {failures[0]!r}")
    name = f"{_CONSOLES} open consoles (Overview)"
    return [
        Figure(f"{name}: CPU of the API", "% of a core", (max(busy[0] - idle[0], 0.0),), (load,), _CPU),
        Figure(f"{name}: transactions of the database", "1/s", (max(busy[1] - idle[1], 0.0),), (load,), _TRANSACTIONS),
    ]


def _refresh(cookies: str, mark: str) -> bytes:
    lines = [
        "GET /console/ HTTP/1.1", "Host: 127.0.0.1", "Accept: text/html", "HX-Request: true", f"Cookie: {cookies}",
        f"X-Console-Mark: {mark}", "Content-Length: 0",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


async def _cookies_of(browser: httpx2.AsyncClient, key: str) -> str:
    """The cookies of a new session."""
    signed_in = await browser.post("/console/sign-in", data={"key": key})
    return "; ".join(f"{name}={value}" for name, value in signed_in.cookies.items())


async def _console(cookies: str, port: int, nth: int) -> None:
    """Refresh a page as a browser does: each request sends the mark of the page that is shown."""
    await asyncio.sleep(_EVERY_SECONDS * nth / _CONSOLES)
    connection, mark = await Connection.open(port), ""
    while True:
        status, _, head = await connection.send_for_head(_refresh(cookies, mark))
        if status not in (httpx2.codes.OK, httpx2.codes.NO_CONTENT):
            raise RuntimeError(f"a refresh was answered {status}")
        match = _MARK.search(head)
        mark = match[1].decode() if match is not None else mark
        await asyncio.sleep(_EVERY_SECONDS)


async def _costs(connection: asyncpg.Connection[asyncpg.Record]) -> tuple[float, float]:
    """The API's CPU in per cent of a core, and the database's transactions a second, during _WINDOW_SECONDS."""
    (api,) = main_processes_of("api")
    await _forget_statistics(connection)
    cpu_before, transactions_before = _cpu(api), await _transactions(connection)
    await asyncio.sleep(_WINDOW_SECONDS)
    cpu_percent = 100 * (_cpu(api) - cpu_before) / _WINDOW_SECONDS
    await _forget_statistics(connection)
    return cpu_percent, (await _transactions(connection) - transactions_before) / _WINDOW_SECONDS


def _cpu(pid: int) -> float:
    return sum(cpu_seconds(process) for process in tree(pid))


async def _transactions(connection: asyncpg.Connection[asyncpg.Record]) -> int:
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    return int(
        await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
    )
