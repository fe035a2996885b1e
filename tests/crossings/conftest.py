from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.db.database import connect, make_pool
from leasehold.settings import Settings
from tests.api.conftest import serving
from tests.crossings.pair import Two
from tests.crossings.stage import Stage
from tests.support.bucket import Bucket
from tests.support.databases import Databases

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

#: While one waits for its database, another thinks: more than three are no faster on two cores.
DATABASES = 3


async def _two(database_url: str) -> Two:
    settings = Settings(database_url=database_url, _env_file=None)
    return Two(*[await connect(settings, "test") for _ in range(2)])


@pytest.fixture
async def two(database_url: str) -> AsyncIterator[Two]:
    """Two connections to a database of the test's own."""
    opened = await _two(database_url)
    yield opened
    await opened.close()


@pytest.fixture
async def batchers(postgres: Databases, migrated_template: str) -> AsyncIterator[list[Two]]:
    """Two connections to each of some databases, where cases run side by side. Within one database they cannot: what
    time does, it does to everything there.
    """
    urls = [await postgres.create_database(migrated_template) for _ in range(DATABASES)]
    opened = [await _two(url) for url in urls]
    yield opened
    for batcher in opened:
        await batcher.close()
    for url in urls:
        await postgres.drop_database(url)


@pytest.fixture(scope="module")
async def stage(
    postgres: Databases, migrated_template: str, s3_server: Bucket, s3_client: S3Client
) -> AsyncIterator[Stage]:
    """An API without a broker; what is revoked is so at once."""
    url, bucket = await postgres.create_database(migrated_template), await s3_server.fresh(s3_client)
    settings = Settings(
        _env_file=None,
        broker="postgres",
        database_url=SecretStr(url),
        api_key_cache_seconds=0,
        s3_endpoint=bucket.endpoint,
        s3_bucket=bucket.bucket,
        s3_access_key=SecretStr(bucket.access_key),
        s3_secret_key=SecretStr(bucket.secret_key),
        sealing_keys=SecretStr(Fernet.generate_key().decode()),
        egress_allow="127.0.0.0/8",
    )
    async with serving(settings) as running, make_pool(settings, "test", 4) as pool:
        yield Stage(running, pool)
    await bucket.delete(s3_client)
    await postgres.drop_database(url)
