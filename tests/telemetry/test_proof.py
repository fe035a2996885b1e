"""Without Grafana: a real Prometheus scrapes a running stack under load, and everything that is asked gets data."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import orjson
import pytest
from pydantic import SecretStr

from grafana.alerts import OBJECTIVES, all_alerts
from grafana.build import HERE, files
from leasehold.db.database import connect
from leasehold.embedded.ports import free_port
from leasehold.pipelines.generation.rows import NewGeneration, create
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob, submit
from tests import pictures
from tests.generation.conftest import TOKEN, buying, ordered
from tests.generation.simulator.server import Simulator
from tests.scenarios.fleet import PATIENCE, Fleet, open_fleet
from tests.scripted import scripted
from tests.support.bucket import Bucket
from tests.support.databases import Databases
from tests.support.prometheus import Prometheus, install_prometheus
from tests.telemetry.page import Page, scrape
from tests.telemetry.stack import endless, snoozing

PICTURE = pictures.encoded(pictures.corners(), "JPEG")
#: What has no data here, each with the reason. A metric that gets data must leave this list.
LATER = {"leasehold_replica_": "this installation has no standby; tests/failover/test_replica.py reads from one"}
_METRIC = re.compile(r"\b(leasehold_\w+)")


@dataclass
class Stack:
    """`silent`: what never had data while the load ran."""

    prometheus: Prometheus
    pages: list[Page]
    silent: set[str]


def expressions() -> Iterator[tuple[str, str]]:
    """Where each comes from, and what a browser would send for it."""
    for path in sorted((HERE / "dashboards").glob("*.json")):
        board = orjson.loads(path.read_bytes())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']} {target['refId']}", chosen(target["expr"])
        for mark in board["annotations"]["list"]:
            yield f"{path.stem}: mark {mark['name']}", mark["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                named = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
                assert named is not None, variable["query"]
                metric, label = named.groups()
                yield f"{path.stem}: choice {variable['name']}", f"group by ({label}) ({metric})"


def chosen(expression: str) -> str:
    return re.sub(r"\$(pipeline|route|table)\b", ".*", expression.replace("$__rate_interval", "30s"))


def reason_against(expression: str) -> str | None:
    return next((reason for part, reason in LATER.items() if part in expression), None)


@pytest.fixture(scope="module")
async def stack(
    run_directory: Path, postgres: Databases, migrated_template: str, shared_vhost: str, s3_server: Bucket
) -> AsyncIterator[Stack]:
    """An API, workers that live, die and are refused, failing and rejected jobs; scraped for a while."""
    directory = run_directory / "proof"
    directory.mkdir(mode=0o755)
    async with s3_server.client() as client:
        bucket = await s3_server.fresh(client)
    settings = _settings(await postgres.create_database(migrated_template), shared_vhost, bucket)
    fleet = await open_fleet(settings, directory)
    prometheus = Prometheus(directory / "prometheus", await install_prometheus())
    try:
        async with Simulator() as simulator:
            yield await _under_load(fleet, prometheus, simulator)
    finally:
        await prometheus.stop()
        await fleet.close()
        await fleet.rows.connection.close()


def _settings(database_url: str, amqp_url: str, bucket: Bucket) -> Settings:
    """As the fixture `settings`, for a whole module."""
    return Settings(
        _env_file=None,
        database_url=SecretStr(database_url),
        amqp_url=SecretStr(amqp_url),
        amqp_queue_prefix="proof",
        s3_endpoint=bucket.endpoint,
        s3_bucket=bucket.bucket,
        s3_access_key=SecretStr(bucket.access_key),
        s3_secret_key=SecretStr(bucket.secret_key),
    )


async def _under_load(fleet: Fleet, prometheus: Prometheus, simulator: Simulator) -> Stack:
    rules = files()[HERE / "prometheus/rules/leasehold.yaml"]
    common: dict[str, Any] = {"pipelines": "tests.telemetry.stack:pipelines", "lease_seconds": 3, "renew_seconds": 1}
    common |= {"trust_margin_seconds": 1}
    api = await fleet.api(metrics_port=0)
    common |= buying(simulator) | {"worker_queues": "default,media,generation", "metrics_port": 0}
    worker = await fleet.worker(**common)
    staying = {"worker_queues": "endless", "drain_seconds": 300}
    leaving = await fleet.worker(**(common | staying))
    # Prometheus must know the port of the doomed worker before that worker starts.
    doomed_port = free_port()
    workers = [worker.metrics_port, leaving.metrics_port, doomed_port]
    await prometheus.start({"leasehold-api": [api.metrics_port], "leasehold-worker": workers}, rules)
    await _until_scraped(prometheus, 3)
    await _troubles(fleet)  # while there is one worker for them, which lives on: what it counted stays to be seen
    doomed = common | {"metrics_port": doomed_port, "failpoints": "after_upload:kill:2"}
    await fleet.worker(**doomed)
    await _until_scraped(prometheus, 4)
    leaving.signal(signal.SIGTERM)
    stopping = asyncio.Event()
    load = asyncio.create_task(_load(fleet, stopping))
    silent = await _until_told(prometheus)
    pages = [await scrape(process.metrics_port) for process in (api, worker)]
    stopping.set()
    await load
    return Stack(prometheus, pages, silent)


async def _troubles(fleet: Fleet) -> None:
    """What happens too rarely to be seen: a child that dies, an error that passes and one that does not, a poll,
    a step that does not end, a message that is no hint.
    """
    acts: list[dict[str, Any]] = [
        {"act": "dies", "args": {"by": "SIGKILL"}},
        {"act": "fail", "args": {"error": "retryable", "code": "passes"}},
        {"act": "fail", "args": {"error": "permanent", "code": "stays"}},
    ]
    connection = await connect(fleet.settings, "test")
    try:
        jobs = [NewJob(scripted, "t", params=act, inputs={"input": "none"}) for act in acts]
        for prompt in ("a cat", "an endless cat #never"):
            await create(connection, NewGeneration(ordered(TOKEN, prompt), prompt, "image", "south", b""))
        endless_job = NewJob(endless, "t")
        await submit(connection, [*jobs, NewJob(snoozing, "t"), endless_job])
        await fleet.reaches(endless_job.id, "wait", "running")
        await fleet.reaches(jobs[0].id, "act", "retry")
    finally:
        await connection.close()
    async with await aio_pika.connect(fleet.settings.amqp_url.get_secret_value()) as broker:
        channel = await broker.channel()
        garbage = aio_pika.Message(b"no hint")
        await channel.default_exchange.publish(garbage, f"{fleet.settings.amqp_queue_prefix}.default.normal")


async def _load(fleet: Fleet, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        await submit(fleet.rows.connection, [ordered(TOKEN, "a cat")])
        good = await fleet.send(PICTURE)
        await fleet.send(PICTURE)  # three jobs a turn for two workers: each gets good ones
        await fleet.send(PICTURE[: len(PICTURE) // 2])
        await fleet.call("POST", "/complete-upload", json=await fleet.upload(b"no picture"))
        await fleet.finished(good["media_id"])


async def _until_scraped(prometheus: Prometheus, targets: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(await prometheus.query("up == 1")) < targets:
            await asyncio.sleep(0.2)


async def _until_told(prometheus: Prometheus) -> set[str]:
    """Wait until the slowest has data, or never will; returns what had none."""
    waiting = dict(expressions())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(120):
            while any(reason_against(expression) is None for expression in waiting.values()):
                for where, expression in list(waiting.items()):
                    if await prometheus.query(expression):
                        del waiting[where]
                await asyncio.sleep(0.5)
    return set(waiting)


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda value: value[:70])
async def test_every_panel_gets_data_or_is_listed_with_its_reason(stack: Stack, where: str, expression: str) -> None:
    """And is listed no longer than it has to be."""
    assert (where in stack.silent) is (reason_against(expression) is not None)


async def test_every_rule_is_evaluated_and_every_ratio_has_a_value(stack: Stack) -> None:
    groups = (await stack.prometheus.get("rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"] for rule in rules} >= {alert.name for alert in all_alerts()}
    for objective in OBJECTIVES:
        (ratio,) = await stack.prometheus.query(objective.record("5m"))
        assert 0 <= float(ratio["value"][1]) <= 1


@pytest.mark.parametrize("alert", all_alerts(), ids=lambda alert: alert.name)
async def test_every_metric_that_an_alert_watches_is_there(stack: Stack, alert: Any) -> None:
    """The alerts themselves are silent here, so each metric that they name is asked for."""
    for name in set(re.findall(r"\b(leasehold[_:][\w:]+)", alert.expression)):
        found = await stack.prometheus.query(f"last_over_time({name}[10m])")
        assert bool(found) is (reason_against(name) is None), name


async def test_prometheus_finds_nothing_to_correct_in_the_names(stack: Stack) -> None:
    """Naming rules of prometheus.io: units in the name, counters in _total, nothing in camel case, help for all."""
    for page in stack.pages:
        for name in page.names:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
            assert not re.search(r"_(ms|milliseconds|minutes|kb|mb)(_|$)", name), name


async def test_a_slow_request_leads_to_its_trace(stack: Stack) -> None:
    found = await stack.prometheus.get(
        "query_exemplars",
        query="leasehold_http_request_duration_seconds_bucket",
        start="0",
        end="9999999999",
    )
    assert any(re.fullmatch("[0-9a-f]{32}", e["labels"]["trace_id"]) for s in found for e in s["exemplars"])
