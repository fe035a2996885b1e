"""The maintenance of pictures by the leader (the worker that is elected for maintenance). It deletes pictures
that never got a job, refuses uploads that are too large, and deletes pictures with their jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.limits import uploads
from leasehold.limits.uploads import Due
from leasehold.pipelines.media import refusals
from leasehold.pipelines.media import transitions as media
from leasehold.transitions.moves import tenant_stays
from leasehold.transitions.quarantine import not_in
from leasehold.transitions.sweeps import EXPIRED

#: A day after a picture was registered, all its upload URLs have expired, because LEASEHOLD_UPLOAD_UNFINISHED_SECONDS
#: is at most a day.
_LONGEST_UPLOAD = timedelta(days=1)
#: The name of the duty (a loop of the worker) that deletes expired pictures without a job. The value describes what the
#: duty did in its first release, when it deleted only abandoned uploads. Do not change the value, because rows of the
#: quarantine contain it.
JOBLESS = "abandoned_uploads"


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The hook `Kind.housekeeping` of the kind of work `media`. The leader runs the duty JOBLESS. (A
    `Forgetting` is a loop that deletes objects and then their rows.) It calls `forget_with_jobs` before it deletes
    jobs, and `too_large` for an upload whose object is too large.
    """
    store, retention_days = context.store, context.settings.retention_days

    async def too_large(connection: Connection, upload: Due, size: int) -> None:
        await refuse_too_large(connection, upload, size, retention_days=retention_days)

    async def forget(connection: Connection, units: Sequence[tuple[UUID, str]]) -> None:
        await forget_jobless_pictures(connection, [media_id for media_id, _ in units])

    return KindHousekeeping(
        duties=[
            Forgetting(
                JOBLESS,
                find=jobless_pictures,
                key=lambda unit: unit[0],  # a unit is one picture: (id, key), from `jobless_pictures`
                delete=lambda unit: store.delete(unit[1]),
                forget=forget,
            )
        ],
        before_jobs_go=forget_with_jobs,
        upload_too_large=too_large,
        prefixes=("media/",),
    )


async def jobless_pictures(connection: Connection, limit: int = 100) -> list[tuple[UUID, str]]:
    """The id and the key of each expired picture that has no job. There are three kinds: pictures whose upload was not
    completed in time, pictures whose upload was refused (their rows are kept for a while), and pictures that a client
    deleted. The duty deletes the objects first, then calls `forget_jobless_pictures`.

    The result leaves out pictures whose deletion failed lately, and pictures of tenants that move to another cell
    (another installation). SKIP LOCKED also leaves out a picture whose completion began in time and is not committed
    yet.
    """
    rows = await connection.fetch(
        f"SELECT id, original_key FROM media WHERE expires_at < statement_timestamp() AND {unindexed('job_id IS NULL')}"
        f" AND {not_in(JOBLESS, 'id')} AND {tenant_stays('media.tenant_id')} ORDER BY expires_at LIMIT $1"
        " FOR UPDATE SKIP LOCKED",
        limit,
    )
    return [(row["id"], row["original_key"]) for row in rows]


async def forget_jobless_pictures(connection: Connection, media_ids: Sequence[UUID]) -> None:
    """Delete the rows of pictures that `jobless_pictures` has returned. An upload URL may outlive its picture. So the
    rows of the table `upload` stay until `forget_at`, the time from which no object can arrive at the key. Housekeeping
    inspects the key at that time (`look_at`). `most = -1` lets it delete any object there, because every object has
    more bytes.
    """
    await connection.execute(
        """
        -- forget_jobless_pictures
        WITH deleted AS (
            DELETE FROM media WHERE id = ANY($1::uuid[]) AND job_id IS NULL AND expires_at < clock_timestamp()
            RETURNING original_key
        )
        UPDATE upload SET open = false, bytes = 0, most = -1, look_at = forget_at
        WHERE key IN (SELECT original_key FROM deleted)
        """,
        list(media_ids),
    )


async def forget_with_jobs(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Delete the pictures of jobs that are about to be deleted.

    An upload URL may outlive its picture. So the key of each picture has a row of `upload` until no object can arrive
    any more. Housekeeping deletes any object that arrives, because it has more than -1 bytes (`most`). Without the row,
    nobody would find the object. Exception: if the URL admitted only one size (`exact`), a completed upload has no row,
    because no harmful object can arrive while the picture exists. Now the picture is deleted, so this function writes
    the row again.
    """
    await connection.execute(
        f"""
        -- forget_media_with_jobs
        WITH deleted AS (
            DELETE FROM media WHERE job_id = ANY($1::uuid[]) AND {EXPIRED}
            RETURNING original_key, tenant_id, created_at + $2::interval AS writable_until
        )
        INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until, look_at, forget_at)
        SELECT original_key, tenant_id, false, false, 0, -1,
               writable_until, writable_until + $3::interval, writable_until + $3::interval
        FROM deleted WHERE writable_until + $3::interval > clock_timestamp()
        ON CONFLICT (key) DO UPDATE SET open = false, bytes = 0, most = -1
        """,
        list(job_ids),
        _LONGEST_UPLOAD,
        uploads.SLOWEST_TRANSFER,
    )


async def refuse_too_large(connection: Connection, upload: Due, size: int, *, retention_days: int) -> None:
    """Record the picture of `upload` as FAILED, in the caller's transaction, because its object of `size` bytes is too
    large. Housekeeping deletes the object afterwards.
    """
    media_id = await connection.fetchval(
        "SELECT id FROM media WHERE original_key = $1 AND tenant_id = $2", upload.key, upload.tenant_id
    )
    if media_id is None:
        return
    refusal = refusals.too_large(size, upload.at_most)
    error = {"code": refusal.code, "message": refusal.message, "retryable": False}
    keep = timedelta(days=retention_days)
    if await media.refuse_upload(connection, media_id, upload.tenant_id, error=error, keep=keep):
        await uploads.close(connection, upload.tenant_id, upload.key, keep=None)  # None: no object stays at the key
