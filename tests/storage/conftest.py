"""The store on two servers: one that does not honour conditional puts (rclone), and one that does (moto)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from pydantic import SecretStr

from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from tests.support.bucket import Bucket


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def settings_of(endpoint: str, access: str, secret: str, bucket: str, **changes: Any) -> Settings:
    return Settings(
        _env_file=None,
        s3_endpoint=endpoint,
        s3_access_key=SecretStr(access),
        s3_secret_key=SecretStr(secret),
        s3_bucket=bucket,
        **changes,
    )


@pytest.fixture(params=["rclone", "moto"])
def store_settings(request: pytest.FixtureRequest) -> Settings:
    if request.param == "moto":
        endpoint = request.getfixturevalue("moto_endpoint")
        return settings_of(endpoint, "access", "secret-key", f"test-{secrets.token_hex(6)}")
    bucket: Bucket = request.getfixturevalue("s3")
    return settings_of(bucket.endpoint, bucket.access_key, bucket.secret_key, bucket.bucket)


@pytest.fixture
async def store(store_settings: Settings) -> AsyncIterator[ObjectStore]:
    opened = ObjectStore.from_settings(store_settings)
    await opened.open()
    await opened.ensure_bucket()
    await opened.probe()
    yield opened
    await opened.close()
