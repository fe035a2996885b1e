"""What the sweeper does for pictures that nobody completed."""

from __future__ import annotations

from datetime import timedelta

from leasehold.db.database import Connection
from leasehold.limits import uploads
from leasehold.limits.uploads import Due
from leasehold.pipelines.media import refusals
from leasehold.pipelines.media import transitions as media


async def refuse_too_large(connection: Connection, due: Due, size: int, *, days: int) -> None:
    """Make the media of an object that is too large FAILED, before its object goes. In a transaction."""
    media_id = await connection.fetchval(
        "SELECT id FROM media WHERE original_key = $1 AND tenant_id = $2", due.key, due.tenant_id
    )
    if media_id is None:
        return
    refused = refusals.too_large(size, due.most)
    error = {"code": refused.code, "message": refused.message, "retryable": False}
    if await media.refuse_upload(
        connection, media_id, due.tenant_id, size=size, error=error, kept=timedelta(days=days)
    ):
        await uploads.close(connection, due.tenant_id, due.key, keep=None)
