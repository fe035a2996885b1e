"""Log lines of real processes: each says whose it is, and none holds a secret."""

from __future__ import annotations

import json
from typing import Any

from leasehold.transitions.jobs import NewJob, submit
from tests import pictures
from tests.scenarios.fleet import Fleet
from tests.scripted import scripted

PICTURE = pictures.encoded(pictures.corners(), "JPEG")
ALWAYS = {"job_id", "media_id", "task_id", "worker_id", "step", "epoch", "request_id", "trace_id"}


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def test_every_line_of_an_attempt_says_whose_it_is_and_leads_to_its_request(fleet: Fleet) -> None:
    """Also the lines of a child that died and of an attempt that failed."""
    worker = await fleet.worker(log_level="debug")
    api = await fleet.api(log_level="debug")
    sent = await fleet.send(PICTURE)
    await fleet.finished(sent["media_id"])
    broken = await fleet.send(PICTURE[: len(PICTURE) // 2])
    await fleet.finished(broken["media_id"], "FAILED")

    async def all_told() -> bool:  # a worker says it after the commit by which the client sees it
        return worker.log.read_text().count("attempt ended") == 4

    await fleet.until(all_told, worker)
    lines = [line for line in lines_of(worker.log.read_text()) if "task_id" in line]
    ended = [line for line in lines if line["event"] == "attempt ended"]
    assert [line["outcome"] for line in ended] == ["succeeded", "succeeded", "succeeded", "failed"]
    for line in lines:
        assert line.keys() >= ALWAYS, line
    accepted = [line for line in lines_of(api.log.read_text()) if line["event"] == "job submitted"]
    for request, attempt in ((accepted[0], ended[0]), (accepted[1], ended[3])):
        for name in ("request_id", "trace_id", "media_id", "job_id"):
            assert request[name] == attempt[name], name


async def test_what_the_heartbeat_says_of_a_lost_lease_names_the_worker_and_the_job(fleet: Fleet) -> None:
    terms: dict[str, Any] = {"lease_seconds": 30, "renew_seconds": 0.5, "trust_margin_seconds": 1}
    worker = await fleet.worker(pipelines="tests.telemetry.stack:pipelines", worker_queues="default", **terms)
    job = NewJob(scripted, "t", params={"act": "hang"}, inputs={"input": "none"})
    await submit(fleet.rows.connection, [job])
    await fleet.reaches(job.id, "act", "running")
    await fleet.rows.connection.execute("UPDATE task SET epoch = epoch + 1 WHERE job_id = $1", job.id)
    await worker.says("lease lost")
    (lost,) = [line for line in lines_of(worker.log.read_text()) if line["event"] == "lease lost"]
    assert lost["job_id"] == str(job.id)
    assert lost.keys() >= {"worker_id", "task_id", "step", "epoch"}


async def test_no_secret_that_a_handler_lets_out_reaches_a_log_an_event_or_the_rows(fleet: Fleet) -> None:
    """A handler whose error quotes all that it should not have."""
    key = f"lh_{'k' * 12}_{'C' * 43}"
    canaries = {
        "the store's secret": fleet.settings.s3_secret_key.get_secret_value(),
        "a signature": "signature-canary",
        "an API key": "C" * 43,
        "a password in a URL": "password-canary",
        "a bearer token": "bearer-canary",
    }
    said = (
        f"{fleet.settings.s3_secret_key.get_secret_value()} https://s3/x?X-Amz-Signature=signature-canary {key} "
        "amqp://u:password-canary@h/ Authorization: Bearer bearer-canary"
    )
    worker = await fleet.worker(pipelines="tests.telemetry.stack:pipelines", worker_queues="default", log_level="debug")
    job = NewJob(scripted, "t", params={"act": "fail", "args": {"error": said}}, inputs={"input": "none"})
    await submit(fleet.rows.connection, [job])
    await fleet.reaches(job.id, "act", "retry")
    await worker.says("attempt ended")
    log = worker.log.read_text()
    kept = await fleet.rows.connection.fetchval(
        "SELECT (SELECT json_agg(f)::text FROM failure f) || (SELECT json_agg(e)::text FROM history e)"
    )
    assert "[redacted]" in log  # it was said, so it could have been
    assert "[redacted]" in kept
    assert [name for name, canary in canaries.items() if canary in log or canary in kept] == []
