"""The tests' own parts: real, migrated, and each test's alone."""

from __future__ import annotations

import aio_pika
import asyncpg

from leasehold.settings import Settings
from tests.support.broker_node import BrokerNode
from tests.support.bucket import Bucket
from tests.support.databases import Databases


async def test_a_database_is_a_copy_of_the_template_it_names(postgres: Databases) -> None:
    template = await postgres.create_database()
    connection = await asyncpg.connect(template)
    await connection.execute("CREATE TABLE mark AS SELECT 7 AS value")
    await connection.close()
    copy = await postgres.create_database(template)
    connection = await asyncpg.connect(copy)
    assert await connection.fetchval("SELECT value FROM mark") == 7
    await connection.close()
    await postgres.drop_database(copy)
    await postgres.drop_database(template)


async def test_two_virtual_hosts_share_no_queue(amqp_url: str) -> None:
    connection = await aio_pika.connect(amqp_url)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("only-here", durable=True)
        assert queue.declaration_result.message_count == 0


async def test_a_bucket_starts_empty_and_takes_objects(s3: Bucket) -> None:
    assert await s3.keys() == []
    async with s3.client() as client:
        await client.put_object(Bucket=s3.bucket, Key="a/b.txt", Body=b"text")
    assert await s3.keys() == ["a/b.txt"]


async def test_settings_point_at_the_tests_own_parts(settings: Settings, s3: Bucket) -> None:
    connection = await asyncpg.connect(settings.database_url.get_secret_value())
    assert await connection.fetchval("SELECT count(*) FROM alembic_version") == 1
    await connection.close()
    assert settings.s3_bucket == s3.bucket


async def test_a_killed_broker_keeps_its_confirmed_messages(rabbitmq_node: BrokerNode) -> None:
    connection = await aio_pika.connect(rabbitmq_node.url)
    channel = await connection.channel(publisher_confirms=True)
    await channel.declare_queue("kept", durable=True)
    await rabbitmq_node.flush_definitions()
    message = aio_pika.Message(b"persistent", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, "kept")
    await connection.close()
    await rabbitmq_node.kill()
    await rabbitmq_node.start()
    async with await aio_pika.connect(rabbitmq_node.url) as again:
        queue = await (await again.channel()).declare_queue("kept", durable=True)
        found = await queue.get()
        assert found is not None
        assert found.body == b"persistent"
