"""Large files, in parts: bounded memory, and nothing half done left in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leasehold.runtime.gather import gather_or_cancel
from leasehold.storage.content import part_of

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef

PART_BYTES = 16 * 1024 * 1024
_AT_ONCE = 2


async def put_in_parts(
    client: S3Client,
    bucket: str,
    key: str,
    path: Path,
    size: int,
    content_type: str,
    metadata: Mapping[str, str],
    **precondition: Any,
) -> str | None:
    """Upload a file; aborted on any error and on cancellation. Returns the ETag."""
    made = await client.create_multipart_upload(
        Bucket=bucket, Key=key, ContentType=content_type, Metadata=dict(metadata)
    )
    upload = {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}
    turns = asyncio.Semaphore(_AT_ONCE)

    async def part(number: int, offset: int) -> CompletedPartTypeDef:
        async with turns:
            data = await asyncio.to_thread(part_of, path, offset, PART_BYTES)
            said = await client.upload_part(**upload, PartNumber=number, Body=data)  # type: ignore[arg-type]  # the three keys above
            return {"PartNumber": number, "ETag": said["ETag"]}

    try:
        parts = await gather_or_cancel(part(n + 1, offset) for n, offset in enumerate(range(0, size, PART_BYTES)))
        done = await client.complete_multipart_upload(
            **upload,  # type: ignore[arg-type]  # as above
            MultipartUpload={"Parts": parts},
            **precondition,
        )
    except BaseException:
        await asyncio.shield(client.abort_multipart_upload(**upload))  # type: ignore[arg-type]  # as above
        raise
    return done.get("ETag")
