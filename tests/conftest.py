"""Fixtures of real servers: each is started once a run, when the first test needs it, and isolated for each test."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest
from pydantic import SecretStr

from leasehold.cli import terminal
from leasehold.cli.installation import default_isolation
from leasehold.db.database import Connection, connect, connected
from leasehold.embedded.directories import RunDirectory
from leasehold.embedded.management import Management
from leasehold.embedded.postgres import Postgres
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.embedded.s3 import S3
from leasehold.runtime import holding
from leasehold.settings import Settings
from tests.support.at_once import FailuresAtOnce
from tests.support.backend import Backend, backend_of
from tests.support.broker_node import BrokerNode
from tests.support.bucket import Bucket
from tests.support.cheap import make_repetitions_cheap
from tests.support.containers import postgres_container, rabbitmq_container, s3_container
from tests.support.databases import Databases
from tests.support.logging_state import logging_as_before
from tests.support.not_here import reasons
from tests.support.seeds import seed_of_this_commit

holding.strict = True  # a connection that is held across outbound I/O fails the test
make_repetitions_cheap()
if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

PORT_OF_MANAGEMENT = 15672
MEMORY_BYTES = 4 * 1024**3


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The logs of the process are as they were after each test."""
    with logging_as_before():
        yield


@pytest.fixture
def own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the tables of a command the width of its own COLUMNS, and not that of an earlier command."""
    monkeypatch.setattr(terminal.console, "_width", None)


@pytest.fixture
def patient_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is there may stand still for longer than a check of readiness waits, which is three seconds, and than
    an answer waits for a check that is not required, which is one.
    """
    monkeypatch.setattr("leasehold.api.fleet.health._TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr("leasehold.api.fleet.health._PATIENCE_SECONDS", 60.0)


@pytest.fixture(scope="session")
def run_directory() -> Iterator[Path]:
    """The directory for the data of private servers. It is removed at the end; after a killed run, by the next run."""
    with RunDirectory(root=memory()) as directory:
        yield directory.path


def memory() -> Path | None:
    """A directory in memory, if the machine has enough: a database is copied in 12 ms there, and in 70 ms on disk."""
    shared = Path("/dev/shm")  # noqa: S108 - mkdtemp makes the name
    plenty = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > MEMORY_BYTES
    return shared if plenty and "LEASEHOLD_TMP" not in os.environ else None


@pytest.fixture(scope="session")
async def postgres(request: pytest.FixtureRequest) -> AsyncIterator[Databases]:
    """The PostgreSQL server of the run."""
    match backend_of("LEASEHOLD_TEST_DATABASE_URL"):
        case Backend.ENVIRONMENT:
            databases = Databases(os.environ["LEASEHOLD_TEST_DATABASE_URL"], _connect)
            yield databases
            await databases.drop_all()
            await databases.close()
        case Backend.DOCKER:
            async with postgres_container() as url:
                databases = Databases(url, _connect)
                yield databases
                await databases.close()
        case Backend.PRIVATE:
            os.environ["PGSSLMODE"] = "disable"  # it has no TLS; to find that out, each connection would need 3 ms
            server = Postgres(request.getfixturevalue("run_directory") / "postgres", durable=False)
            await server.start()
            databases = Databases(server.url, _connect)
            yield databases
            await databases.close()
            await server.stop("immediate")


@pytest.fixture(scope="session")
async def migrated_template(postgres: Databases) -> str:
    """The URL of a database at the newest revision. It is migrated once, and tests get copies."""
    from leasehold.db.database import migrate  # noqa: PLC0415 - only runs that need a database load it

    if given := os.environ.get("LEASEHOLD_TEST_TEMPLATE_URL"):  # scripts/mutants: hundreds of runs on one server
        return given
    template = await postgres.create_database()
    await migrate(template)
    return template


async def _connect(url: str) -> asyncpg.Connection[asyncpg.Record]:
    return await connect(_defaults().model_copy(update={"database_url": SecretStr(url)}), "test")


@pytest.fixture
async def database_url(
    request: pytest.FixtureRequest, postgres: Databases, migrated_template: str
) -> AsyncIterator[str]:
    """The URL of the test's own database, migrated and empty."""
    with_session = not {"connection", "another"}.isdisjoint(request.fixturenames)
    url = await postgres.lend(migrated_template, with_session=with_session)
    yield url
    await postgres.give_back(url, migrated_template)


@pytest.fixture(scope="session")
async def rabbitmq(request: pytest.FixtureRequest) -> AsyncIterator[Management]:
    """The management API of the run's RabbitMQ."""
    match backend_of("LEASEHOLD_TEST_AMQP_URL"):
        case Backend.ENVIRONMENT:
            yield management_of_environment()
        case Backend.DOCKER:
            async with rabbitmq_container() as management:
                yield management
        case Backend.PRIVATE:
            directory: Path = request.getfixturevalue("run_directory")
            node = RabbitMQ(directory / "rabbitmq", await install_rabbitmq())
            await node.start()
            yield node.management
            await node.kill()


def management_of_environment() -> Management:
    amqp = os.environ["LEASEHOLD_TEST_AMQP_URL"]
    host = amqp.rpartition("@")[2].partition("/")[0].rpartition(":")[0] or "127.0.0.1"
    url = os.environ.get("LEASEHOLD_TEST_AMQP_MANAGEMENT_URL", f"http://{host}:{PORT_OF_MANAGEMENT}")
    return Management(url, amqp)


@pytest.fixture
async def amqp_url(rabbitmq: Management) -> AsyncIterator[str]:
    """The URL of the test's own virtual host."""
    name = f"test-{secrets.token_hex(6)}"
    yield await rabbitmq.add_vhost(name)
    await rabbitmq.delete_vhost(name)


@pytest.fixture(scope="session")
async def shared_vhost(rabbitmq: Management) -> AsyncIterator[str]:
    """The URL of a virtual host for tests whose queues have different names: a new host takes half a second."""
    name = f"test-{secrets.token_hex(6)}"
    yield await rabbitmq.add_vhost(name)
    await rabbitmq.delete_vhost(name)


@pytest.fixture(scope="session")
async def breakable_rabbitmq(run_directory: Path) -> AsyncIterator[RabbitMQ]:
    node = RabbitMQ(run_directory / "breakable-rabbitmq", await install_rabbitmq())
    yield node
    await node.kill()


@pytest.fixture
async def rabbitmq_node(breakable_rabbitmq: RabbitMQ) -> AsyncIterator[BrokerNode]:
    """A RabbitMQ node that the test may stop, kill and start."""
    node = BrokerNode(breakable_rabbitmq)
    await node.open()
    yield node
    await node.close()


@pytest.fixture(scope="session")
async def s3_server(request: pytest.FixtureRequest) -> AsyncIterator[Bucket]:
    match backend_of("LEASEHOLD_TEST_S3_ENDPOINT"):
        case Backend.ENVIRONMENT:
            yield Bucket(
                os.environ["LEASEHOLD_TEST_S3_ENDPOINT"],
                os.environ["LEASEHOLD_TEST_S3_ACCESS_KEY"],
                os.environ["LEASEHOLD_TEST_S3_SECRET_KEY"],
                "",
            )
        case Backend.DOCKER:
            async with s3_container() as server:
                yield server
        case Backend.PRIVATE:
            process = S3(request.getfixturevalue("run_directory") / "s3")
            await process.start()
            yield Bucket(process.endpoint, process.access_key, process.secret_key, "")
            await process.stop()


@pytest.fixture(scope="session")
async def s3_client(s3_server: Bucket) -> AsyncIterator[S3Client]:
    """The client of all buckets: making a client takes 20 ms."""
    async with s3_server.client() as client:
        yield client


@pytest.fixture(scope="session")
def untouched_buckets() -> list[Bucket]:
    """Buckets that tests have left without an object and without an upload: most tests store nothing."""
    return []


@pytest.fixture
async def s3(s3_server: Bucket, s3_client: S3Client, untouched_buckets: list[Bucket]) -> AsyncIterator[Bucket]:
    """The test's own bucket."""
    bucket = untouched_buckets.pop() if untouched_buckets else await s3_server.fresh(s3_client)
    yield bucket
    if await bucket.is_untouched(s3_client):
        untouched_buckets.append(bucket)
    else:
        await bucket.delete(s3_client)


@pytest.fixture
def settings(database_url: str, shared_vhost: str, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The platform's settings for the test's own database, queues and bucket."""
    for name in list(os.environ):
        if name.startswith("LEASEHOLD_") and not name.startswith("LEASEHOLD_TEST_"):
            monkeypatch.delenv(name)  # settings of the person who runs the tests must not change a test
    chosen = {
        "database_url": SecretStr(database_url),
        "amqp_url": SecretStr(shared_vhost),
        "amqp_queue_prefix": f"test-{secrets.token_hex(6)}",
        "s3_endpoint": s3.endpoint,
        "s3_bucket": s3.bucket,
        "s3_access_key": SecretStr(s3.access_key),
        "s3_secret_key": SecretStr(s3.secret_key),
    }
    return _defaults().model_copy(update=chosen)


@pytest.fixture
async def connection(settings: Settings, postgres: Databases) -> AsyncIterator[Connection]:
    """A connection to the test's own database."""
    if settings.database_timeout == _defaults().database_timeout:
        async with postgres.session(settings.database_url.get_secret_value()) as opened:
            yield opened
    else:
        async with connected(settings, "test") as opened:
            yield opened


@pytest.fixture
def rows(connection: Connection) -> Connection:
    """The same connection, for tests that only read and write rows with it."""
    return connection


@cache
def _defaults() -> Settings:
    """Made once: reading all sources of settings takes 4 ms."""
    # The tests run on any kernel; tests of isolation choose it themselves.
    return Settings(_env_file=None, isolation=default_isolation())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests that find most errors first, then the longest files, so that no long file starts last."""
    first = (Path(__file__).parent / "slowest.txt").read_text().split()

    def place(item: pytest.Item) -> int:
        return next((n for n, path in enumerate(first) if item.nodeid.startswith(path)), len(first))

    items.sort(key=place)


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # the processes of xdist have no terminal
        session.config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_report_header() -> str:
    return f"random tests: LEASEHOLD_TEST_SEED={seed_of_this_commit()}"


def pytest_collection_finish() -> None:
    """Exclude the objects of the imports from garbage collection: a collection of all of them takes 0.15 s."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that this machine could not run: none is skipped silently."""
    skipped = reasons(terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section("not run on this machine", sep="-")
    for reason, tests in sorted(skipped.items()):
        terminalreporter.line(f"{reason}:")
        for test in tests:
            terminalreporter.line(f"  {test}")
