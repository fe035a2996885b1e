"""A bucket on the tests' S3 server, with its address and its keys."""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import aioboto3
import botocore.exceptions
from aiobotocore.config import AioConfig

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

CONFIG = AioConfig(
    signature_version="s3v4",
    s3={"addressing_style": "path"},
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    retries={"mode": "standard", "total_max_attempts": 2},
)


@cache
def _session() -> aioboto3.Session:
    """The session of all clients: each new session reads botocore's descriptions again, which takes 0.1 s."""
    return aioboto3.Session()


@dataclass(frozen=True)
class Bucket:
    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str
    region: str = "us-east-1"

    def client(self) -> AbstractAsyncContextManager[S3Client]:
        """An S3 client, with which a test reads what the code under test has stored."""
        return _session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            verify=None if self.endpoint.startswith("https://") else False,
            config=CONFIG,
        )

    async def answers(self) -> bool:
        try:
            async with self.client() as client:
                await client.list_buckets()
        except botocore.exceptions.BotoCoreError:
            return False
        return True

    async def fresh(self, client: S3Client) -> Bucket:
        """Make another bucket on the same server. Returns it, empty."""
        bucket = replace(self, bucket=f"test-{secrets.token_hex(6)}")
        await client.create_bucket(Bucket=bucket.bucket)
        return bucket

    async def keys(self) -> list[str]:
        async with self.client() as client:
            return await self._keys(client)

    async def _keys(self, client: S3Client) -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [item["Key"] async for page in pages for item in page.get("Contents", [])]

    async def is_untouched(self, client: S3Client) -> bool:
        """Whether it has neither an object nor an unfinished upload."""
        if (await client.list_objects_v2(Bucket=self.bucket, MaxKeys=1)).get("Contents"):
            return False
        try:
            return not (await client.list_multipart_uploads(Bucket=self.bucket)).get("Uploads")
        except botocore.exceptions.ClientError as error:
            return bool(error.response["Error"]["Code"] == "NoSuchUpload")  # rclone's answer where there is none

    async def delete(self, client: S3Client) -> None:
        """Delete the bucket with all its objects.

        Exception: after a put that lost a race, rclone keeps a temporary file that it does not list, and refuses to
        delete the bucket. That bucket is deleted with the run's directory.
        """
        for key in await self._keys(client):
            await client.delete_object(Bucket=self.bucket, Key=key)
        with suppress(botocore.exceptions.ClientError):
            await client.delete_bucket(Bucket=self.bucket)
