"""Starts PostgreSQL, RabbitMQ and an S3 server as containers, for machines where a Docker daemon answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
from testcontainers.core.container import DockerContainer

from leasehold.embedded.management import Management
from tests.support.bucket import Bucket

# The tags of compose.yaml.
POSTGRES_IMAGE = "postgres:18.4-bookworm"
RABBITMQ_IMAGE = "rabbitmq:4.2.1-management"
RCLONE_IMAGE = "rclone/rclone:1.75.2"
START_SECONDS = 120.0


@asynccontextmanager
async def running(container: DockerContainer) -> AsyncIterator[DockerContainer]:
    await asyncio.to_thread(container.start)
    try:
        yield container
    finally:
        await asyncio.to_thread(container.stop)


async def until(ready: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the server in a container is ready: a container sends no such message."""
    async with asyncio.timeout(START_SECONDS):
        while not await ready():
            await asyncio.sleep(0.1)


def address(container: DockerContainer, port: int) -> str:
    return f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"


@asynccontextmanager
async def postgres_container() -> AsyncIterator[str]:
    """Yields the URL of a PostgreSQL that lives during the block."""
    password = secrets.token_hex(16)
    container = (
        DockerContainer(POSTGRES_IMAGE)
        .with_env("POSTGRES_PASSWORD", password)
        .with_command("postgres -c fsync=off -c full_page_writes=off -c max_connections=200")
        .with_exposed_ports(5432)
    )
    async with running(container):
        url = f"postgresql://postgres:{password}@{address(container, 5432)}/postgres"
        await until(lambda: _accepts(url))
        yield url


async def _accepts(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
    except (OSError, asyncpg.PostgresError):
        return False
    await connection.close()
    return True


@asynccontextmanager
async def rabbitmq_container() -> AsyncIterator[Management]:
    """Yields the management API of a RabbitMQ that lives during the block."""
    password = secrets.token_hex(16)
    container = (
        DockerContainer(RABBITMQ_IMAGE)
        .with_env("RABBITMQ_DEFAULT_USER", "leasehold")
        .with_env("RABBITMQ_DEFAULT_PASS", password)
        .with_exposed_ports(5672, 15672)
    )
    async with running(container):
        amqp = f"amqp://leasehold:{password}@{address(container, 5672)}/"
        management = Management(f"http://{address(container, 15672)}", amqp)
        await until(management.is_ready)
        yield management


@asynccontextmanager
async def s3_container() -> AsyncIterator[Bucket]:
    """Yields the address and the keys of an S3 server without buckets, which lives during the block."""
    secret = secrets.token_hex(20)
    container = (
        DockerContainer(RCLONE_IMAGE)
        .with_command(f"serve s3 --addr :8080 --auth-key leasehold,{secret} --allow-origin * /data")
        .with_exposed_ports(8080)
    )
    async with running(container):
        server = Bucket(f"http://{address(container, 8080)}", "leasehold", secret, "")
        await until(server.answers)
        yield server
