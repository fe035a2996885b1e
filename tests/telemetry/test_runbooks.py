"""What the runbooks name is real, and each of their commands is run: a person types them at night, beside an alert."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
import yaml

import leasehold
from leasehold.db.database import Connection
from leasehold.embedded.ports import free_port
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import EmbeddedError, unprivileged
from leasehold.settings import Settings
from tests.failover.cluster import Cluster, cluster_in
from tests.scenarios.fleet import Fleet
from tests.support.broker_node import BrokerNode

ROOT = Path(__file__).parents[2]
RUNBOOKS = {path.stem: path.read_text() for path in sorted((ROOT / "docs/operations/runbooks").glob("*.md"))}
METRICS = set(re.findall(r"\bleasehold_[a-z0-9_]+", (ROOT / "docs/reference/metrics.md").read_text()))
SOURCES = [path for folder in ("leasehold", "api", "worker") for path in (ROOT / folder).rglob("*.py")]
ENDINGS = ("", "_bucket", "_count", "_sum")
SQL = re.compile(r"(SELECT|INSERT|UPDATE|DELETE|VACUUM|ANALYZE|REINDEX|CHECKPOINT|GRANT|ALTER|CREATE|DROP)\b")
#: The log line of an outage, which names what is away.
OUTAGE = re.compile(r"the (database|broker|object store) is away; trying again until it is back")
#: The programs that a reader starts. `dmesg` and those of an engine need rights or programs that a test has not.
PROGRAMS = {
    "leasehold doctor",
    "pg_isready",
    "rabbitmq-diagnostics check_port_connectivity",
    "docker compose ps",
    "docker compose up -d --scale worker=4",
    "dmesg",
}
#: PostgreSQL's own settings, by their names.
OF_POSTGRESQL = {"max_connections", "max_standby_streaming_delay", "hot_standby_feedback = on"}


def quoted(text: str) -> list[str]:
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


@pytest.fixture(scope="module")
async def cluster(run_directory: Path) -> AsyncIterator[Cluster]:
    """A primary with its standby, and the role of deploy/postgres/roles.sh."""
    async with cluster_in(run_directory / "runbooks", "asynchronous") as cluster:
        async with servers_of(cluster) as (primary, _):
            await primary.execute("CREATE ROLE leasehold_app NOINHERIT")
        yield cluster


@asynccontextmanager
async def servers_of(cluster: Cluster) -> AsyncIterator[tuple[Connection, Connection]]:
    primary, standby = [await asyncpg.connect(server.url) for server in (cluster.primary, cluster.standby)]
    yield primary, standby
    for session in (primary, standby):
        await session.close()


def statements_of(name: str) -> list[tuple[str, bool]]:
    """The statements of the runbook in their order, and whether each is for the standby: by the last server that its
    line names before it, or by the words behind it.
    """
    found = []
    for item in re.split(r"\n(?=\d\. |- |#)", RUNBOOKS[name]):
        text = " ".join(item.split())
        for span in re.finditer(r"`([^`]+)`", text):
            if SQL.match(span[1]):
                before = re.findall(r"\bon the (primary|standby)\b", text[: span.start()], re.IGNORECASE)
                behind = re.match(r" on the (primary|standby)\b", text[span.end() :])
                found.append((span[1], [*before, *(behind.groups() if behind else ())][-1:] == ["standby"]))
    return found


@pytest.mark.parametrize("name", [name for name in RUNBOOKS if statements_of(name)])
async def test_every_statement_does_its_work_on_a_real_server(cluster: Cluster, name: str) -> None:
    """What the reader fills in is filled in here: a forgotten session, a queue, a unit that is set aside."""
    forgotten = await asyncpg.connect(cluster.primary.url)
    ended = asyncio.Event()
    forgotten.add_termination_listener(lambda _: ended.set())
    await forgotten.execute("BEGIN; SELECT pg_current_xact_id()")
    async with servers_of(cluster) as (primary, standby):
        await primary.execute(
            "INSERT INTO quarantine (duty, unit, failures, error, failed_at, retry_at)"
            " VALUES ('schedules', 'one', 1, '{}', now(), now()) ON CONFLICT DO NOTHING"
        )
        for statement, is_standby in statements_of(name):
            written = statement.replace("(pid)", f"({forgotten.get_server_pid()})").replace(
                "queue = '...'", "queue = 'default'"
            )
            written = written.replace("duty = ... AND unit = ...", "duty = 'schedules' AND unit = 'one'")
            assert "..." not in written, statement
            done = await (standby if is_standby else primary).execute(written)
            assert not done.startswith("DELETE") or done == "DELETE 1"
        if "GRANT pg_read_all_stats" in RUNBOOKS[name]:
            assert await primary.fetchval("SELECT pg_has_role('leasehold_app', 'pg_read_all_stats', 'USAGE')")
    if "pg_terminate_backend" in RUNBOOKS[name]:
        await asyncio.wait_for(ended.wait(), 60)
    forgotten.terminate()


@pytest.mark.parametrize("name", RUNBOOKS)
def test_every_metric_exists(name: str) -> None:
    named = set(re.findall(r"\bleasehold_[a-z0-9_]+[a-z0-9]\b(?!_)", RUNBOOKS[name]))
    named.discard("leasehold_app")  # a role
    assert {one for one in named if not any(one.removesuffix(end) in METRICS for end in ENDINGS)} == set()


def test_every_log_line_exists() -> None:
    """A runbook quotes log lines after the word "log": each is in the code, or is the line of an outage."""
    code = "\n".join(path.read_text() for path in SOURCES)
    lines = {
        (name, line)
        for name, text in RUNBOOKS.items()
        for sentence in re.findall(r"\blogs?\b[^.]*?`.*", text)
        for line in quoted(sentence)
        if re.fullmatch(r"[a-z][a-z']*( [a-z;']+){2,}", line)
    }
    assert len(lines) > 5
    assert {(name, line) for name, line in lines if f'"{line}"' not in code and not OUTAGE.fullmatch(line)} == set()


def test_every_word_of_code_is_a_command_that_is_run_or_a_name_that_exists() -> None:
    """So no runbook names a command that the tests of this file do not try."""
    code = "\n".join(path.read_text() for path in [*SOURCES, *(ROOT / "grafana").glob("*.py")])
    files = {str(path.relative_to(ROOT)) for path in SOURCES}
    unknown = [
        (name, span)
        for name, text in RUNBOOKS.items()
        for span in quoted(text)
        if not (SQL.match(span) or OUTAGE.fullmatch(span) or span in PROGRAMS or span in OF_POSTGRESQL or span in files)
        and not (hasattr(signal, span) or hasattr(leasehold, span.removeprefix("leasehold.")))
        and not any(span.removesuffix(end) in METRICS for end in ENDINGS)
        and not (span.startswith("LEASEHOLD_") and span.removeprefix("LEASEHOLD_").lower() in Settings.model_fields)
        and not re.search(rf"(?<![a-z_]){re.escape(span)}(?![a-z_])", code)
        and not _is_value_of_the_chart(span)
    ]
    assert unknown == []


def _is_value_of_the_chart(span: str) -> bool:
    at = yaml.safe_load((ROOT / "deploy/helm/leasehold/values.yaml").read_text())
    for name in span.split("."):
        if not isinstance(at, dict) or name not in at:
            return False
        at = at[name]
    return "." in span


def test_every_program_of_the_list_is_of_a_runbook() -> None:
    assert {span for text in RUNBOOKS.values() for span in quoted(text)} >= PROGRAMS


async def test_the_doctor_and_the_probe_of_postgresql_say_whether_it_is_there(cluster: Cluster, fleet: Fleet) -> None:
    url = urlsplit(cluster.primary.url)
    probe = (await find_postgres(unprivileged())) / "pg_isready"
    doctor = Path(sys.executable).with_name("leasehold")
    for port, is_there in ((url.port, True), (free_port(), False)):
        assert ((await run(probe, "-t", "60", "-h", str(url.hostname), "-p", str(port)))[0] == 0) is is_there
        there = url._replace(netloc=f"{url.netloc.rpartition(':')[0]}:{port}").geturl()
        status, printed = await run(doctor, "doctor", env=fleet.environment(database_url=there))
        assert (status == 0) is is_there, printed
        assert ("accepts writes" in printed) is is_there, printed


async def test_the_probe_of_rabbitmq_says_that_it_is_there_and_that_it_is_away(rabbitmq_node: BrokerNode) -> None:
    (command,) = [program.split() for program in PROGRAMS if program.startswith("rabbitmq-")]
    await rabbitmq_node.run_tool(*command)
    await rabbitmq_node.kill()
    with pytest.raises(EmbeddedError):
        await rabbitmq_node.run_tool(*command)


def test_what_compose_is_told_is_a_service_of_the_file() -> None:
    """No engine runs here, so the command itself is not tried."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    scaled = [name for program in PROGRAMS for name in re.findall(r"--scale (\w+)=", program)]
    assert scaled
    assert set(scaled) <= services.keys()


async def run(program: str | Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit status of the program, and what it prints."""
    process = await asyncio.create_subprocess_exec(
        program, *arguments, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()
