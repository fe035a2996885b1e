"""Secrets in files: each server is asked with the new one, without a restart of the process."""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import httpx2
import pytest
from pydantic import SecretStr

from leasehold.broker import make_broker
from leasehold.db.database import connected, make_pool
from leasehold.domain.errors import StoreError
from leasehold.file_secrets import FileSecret
from leasehold.settings import Settings
from leasehold.storage import ObjectStore


def in_file(path: Path, value: str) -> FileSecret:
    path.write_text(value)
    return FileSecret(path)


def as_user(url: str, user: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{user}:{user}@{parts.netloc.rpartition('@')[2]}").geturl()


async def test_new_connections_to_postgresql_use_the_new_user(
    settings: Settings, database_url: str, tmp_path: Path
) -> None:
    roles = [f"rotated_{secrets.token_hex(4)}" for _ in "ab"]
    admin = await asyncpg.connect(database_url)
    try:
        for role in roles:
            await admin.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
        path = tmp_path / "url"
        rotated = settings.model_copy(update={"database_url": in_file(path, as_user(database_url, roles[0]))})
        async with make_pool(rotated, "rotation", 2) as pool, pool.acquire() as connection:
            assert await connection.fetchval("SELECT current_user") == roles[0]
            path.write_text(as_user(database_url, roles[1]))
            # The open session goes on; another one is of the new user.
            async with pool.acquire() as other, connected(rotated, "rotation") as single:
                assert await connection.fetchval("SELECT current_user") == roles[0]
                assert await other.fetchval("SELECT current_user") == roles[1]
                assert await single.fetchval("SELECT current_user") == roles[1]
    finally:
        for role in roles:
            await admin.execute(f"DROP ROLE IF EXISTS {role}")
        await admin.close()


async def test_the_store_is_asked_with_the_new_key(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "key"
    right = settings.s3_secret_key.get_secret_value()
    rotated = settings.model_copy(
        update={"s3_secret_key": in_file(path, "not-the-key-of-this-store"), "s3_conditional_puts": "no"}
    )
    store = ObjectStore.from_settings(rotated)
    await store.open()
    try:
        with pytest.raises(StoreError, match="refused the platform's credentials"):
            await store.put("rotated", b"bytes", content_type="text/plain", metadata={})
        async with httpx2.AsyncClient(timeout=60) as client:
            assert (await client.get(store.sign_get("rotated", seconds=60))).status_code == HTTPStatus.FORBIDDEN
            path.write_text(right)
            await store.put("rotated", b"bytes", content_type="text/plain", metadata={})
            assert (await client.get(store.sign_get("rotated", seconds=60))).content == b"bytes"
    finally:
        await store.close()


async def test_the_broker_is_asked_with_the_new_password(amqp_url: str, tmp_path: Path) -> None:
    path = tmp_path / "url"
    wrong = as_user(amqp_url, "nobody")
    settings = Settings(_env_file=None, amqp_url=in_file(path, wrong), amqp_queue_prefix="rotation")
    broker = make_broker(settings)
    await broker.open()
    try:
        assert not broker.connected
        path.write_text(amqp_url)
        async with asyncio.timeout(60):
            while not broker.connected:
                await asyncio.sleep(0.02)
    finally:
        await broker.close()


def test_settings_of_one_process_share_what_they_read(tmp_path: Path) -> None:
    secret = in_file(tmp_path / "url", "postgresql://a@h/d")
    settings = Settings(_env_file=None, database_url=secret)
    assert settings.direct().database_url is secret
    assert (
        Settings(_env_file=None, database_direct_url=secret, database_url=SecretStr("x")).direct().database_url
        is secret
    )
