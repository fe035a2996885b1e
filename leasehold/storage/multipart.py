"""The multipart upload of a large local file, for ObjectStore.put.

Memory is bounded, because at most two parts are in memory at once. An upload that fails is aborted, so that the store
drops its parts. If the abort fails, too, a maintenance loop of the workers aborts the upload later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from leasehold.runtime.gather import gather_or_cancel
from leasehold.storage.content import read_part

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef

log = structlog.get_logger(__name__)

PART_BYTES = 16 * 1024 * 1024  # of each part, except the last, which may be smaller
#: The most parts that S3 allows for one object.
MAX_PARTS = 10_000
_PARTS_AT_ONCE = 2


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
    """Upload a file and return the ETag. Once the store has begun the upload, any error or cancellation aborts it.

    `precondition`: `IfMatch` or `IfNoneMatch`; the store checks it after the last part has arrived.
    """
    upload_started = await client.create_multipart_upload(
        Bucket=bucket, Key=key, ContentType=content_type, Metadata=dict(metadata)
    )
    upload = {"Bucket": bucket, "Key": key, "UploadId": upload_started["UploadId"]}
    semaphore = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def send_part(number: int, offset: int) -> CompletedPartTypeDef:
        async with semaphore:
            data = await asyncio.to_thread(read_part, path, offset, PART_BYTES)
            answer = await client.upload_part(**upload, PartNumber=number, Body=data)  # type: ignore[arg-type]  # the three keys above
            return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        offsets = range(0, size, PART_BYTES)
        parts = await gather_or_cancel(send_part(number, offset) for number, offset in enumerate(offsets, 1))
        completed = await client.complete_multipart_upload(
            **upload,  # type: ignore[arg-type]  # as above
            MultipartUpload={"Parts": parts},
            **precondition,
        )
    except BaseException:
        await _abort(client, upload)
        raise
    return completed.get("ETag")


async def _abort(client: S3Client, upload: Mapping[str, str]) -> None:
    """Abort the upload. If the abort fails, the error is only logged, because the caller must get the upload's own
    error. A maintenance loop of the workers then aborts the upload later.
    """
    try:
        await asyncio.shield(client.abort_multipart_upload(**upload))  # type: ignore[arg-type]  # as above
    except Exception as error:  # noqa: BLE001 - any error of the store or the network: see above
        log.warning("the upload was not aborted", key=upload["Key"], error=type(error).__name__)
