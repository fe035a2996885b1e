"""The release that is out beside this code, on one database, broker and bucket: `scripts/chaos --fault "F42 ..."` and
`"F43 ..."` do the same with all kinds of work, for as long as one likes.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from chaos.release import Release
from tests.pictures import encoded, noisy
from tests.scenarios.fleet import Fleet, Process

PICTURES = 3
PICTURE = encoded(noisy(1600, 1200), "JPEG", quality=85)


@pytest.fixture(scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    release = Release(tmp_path_factory.mktemp("release") / "it")
    await release.unpack()
    return release


async def holds(fleet: Fleet, worker: Process, send: Callable[[], Awaitable[None]]) -> bool:
    """Whether the worker runs a step now. Sends more if all is done: a busy machine may look too late."""
    rows = fleet.rows.connection
    held = await rows.fetchval(
        "SELECT EXISTS (SELECT 1 FROM task t JOIN worker w ON w.id = t.lease_owner"
        " WHERE t.status = 'running' AND w.pid = $1)",
        worker.pid,
    )
    if not held and not await rows.fetchval("SELECT EXISTS (SELECT 1 FROM job WHERE finished_at IS NULL)"):
        await send()
    return bool(held)


async def test_old_and_new_workers_and_apis_share_all_work_and_take_over_from_each_other(
    fleet: Fleet, release: Release
) -> None:
    """A new worker takes over what an old one held when it was killed, and an old one from a new one."""
    await fleet.api(release.directory)
    old_api = fleet.api_url
    await fleet.api_here()
    new_api = fleet.api_url
    accepted = []

    async def send() -> None:
        for fleet.api_url in (old_api, new_api):
            accepted.extend([await fleet.send(PICTURE) for _ in range(PICTURES)])

    old, new = await fleet.worker(release.directory), await fleet.worker()
    assert await _of_the_release(fleet) == {old.pid: True, new.pid: False}
    for victim, survivor in ((old, new), (new, None)):
        if survivor is None:
            await fleet.worker(release.directory)
        await send()
        await fleet.until(lambda victim=victim: holds(fleet, victim, send))
        victim.signal(signal.SIGKILL)
        await victim.wait()
        for fleet.api_url in (old_api, new_api):
            for one in accepted:
                await fleet.finished(one["media_id"])
    await fleet.at_rest()
    for one in accepted:
        await fleet.assert_done_once(UUID(one["job_id"]))
    assert await fleet.rows.connection.fetchval("SELECT sum(errors + crashes) FROM task") == 0


async def _of_the_release(fleet: Fleet) -> dict[int, bool]:
    """Which workers run the release's code: it knows no incarnation of the server."""
    rows = await fleet.rows.connection.fetch("SELECT pid, incarnation IS NULL AS old FROM worker")
    return {row["pid"]: row["old"] for row in rows}
