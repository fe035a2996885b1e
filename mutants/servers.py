"""Starts the servers of a place where mutants are judged. Yields the variables by which tests find them."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from leasehold.db.database import migrate
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.embedded.stack import EmbeddedStack

TEMPLATE = "LEASEHOLD_TEST_TEMPLATE_URL"
_MEMORY_BYTES = 4 * 1024**3
#: Alembic can run only once at a time in a process.
_MIGRATING = asyncio.Lock()


@asynccontextmanager
async def servers() -> AsyncIterator[dict[str, str]]:
    """Private PostgreSQL, RabbitMQ and S3. Their files are in memory if it has room: there a copy of a database takes
    12 ms.
    """
    _use_memory()
    async with EmbeddedStack(durable=False, rabbitmq=await install_rabbitmq()) as stack:
        assert stack.postgres is not None
        assert stack.rabbitmq is not None
        assert stack.s3 is not None
        yield {
            "LEASEHOLD_TEST_BACKEND": "auto",
            "LEASEHOLD_TEST_DATABASE_URL": stack.postgres.url,
            "LEASEHOLD_TEST_AMQP_URL": stack.rabbitmq.url,
            "LEASEHOLD_TEST_AMQP_MANAGEMENT_URL": stack.rabbitmq.management.url,
            "LEASEHOLD_TEST_S3_ENDPOINT": stack.s3.endpoint,
            "LEASEHOLD_TEST_S3_ACCESS_KEY": stack.s3.access_key,
            "LEASEHOLD_TEST_S3_SECRET_KEY": stack.s3.secret_key,
            TEMPLATE: await template(stack.postgres.url),
        }


def _use_memory() -> None:
    memory = Path("/dev/shm")  # noqa: S108 - the stack makes the name
    if memory.is_dir() and shutil.disk_usage(memory).free > _MEMORY_BYTES:
        os.environ.setdefault("LEASEHOLD_TMP", str(memory))


async def template(url: str) -> str:
    """Make a database with the newest schema. Each test gets a copy of it. Returns its URL."""
    name = f"template_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()
    template_url = urlsplit(url)._replace(path=f"/{name}").geturl()
    async with _MIGRATING:
        await migrate(template_url)
    return template_url
