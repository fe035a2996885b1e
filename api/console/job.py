"""The page of a job: its parameters, its timeline, why it waits, and its outputs. Also the forms to cancel, retry,
signal or delete the job, and the pictures among its outputs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import JOBS_DELETE, JOBS_OPERATE, JOBS_READ, RUNS_WRITE, tenant_of
from leasehold.api.console.acts import Act, acts_on
from leasehold.api.console.graph import graph_of
from leasehold.api.console.rendering import content_of, form_idempotency_key, go_to, page, unchanged
from leasehold.api.console.routes import Fields, typed_json
from leasehold.api.console.session import SignedIn
from leasehold.api.console.signal_form import inputs_of, payload_of
from leasehold.api.console.timeline import WRITTEN_BY_WORKERS, timeline
from leasehold.api.http.strict_json import refusal
from leasehold.api.jobs import jobs as endpoints
from leasehold.api.jobs.access import JobAccess, find, may_retry
from leasehold.api.jobs.explain import Depth, explain
from leasehold.api.jobs.schemas import Reason, RetryRequest
from leasehold.api.jobs.view import answer, with_links
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.signals import Name, SignalRequest, signal_run
from leasehold.db import event_reads, job_reads, log_reads, operation_reads
from leasehold.db.database import Connection
from leasehold.db.event_reads import EventView
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Conflict, Gone, Invalid, NotFound
from leasehold.domain.sentences import full_stop
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.transitions.jobs import EXTERNAL
from leasehold.transitions.workflows import signals

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(JOBS_READ))]
Operator = Annotated[Caller, Depends(SignedIn(JOBS_OPERATE))]
Signaller = Annotated[Caller, Depends(SignedIn(RUNS_WRITE))]
Deleter = Annotated[Caller, Depends(SignedIn(JOBS_DELETE))]
#: The longest payload, in characters, that the page puts into a command to copy or into a form.
_MAX_PAYLOAD = 2000
#: The page shows at most this many events, ledger entries, steps, outputs and log lines. The ledger of a job records
#: what each worker claimed and wrote.
_MAX_EVENTS, _MAX_LEDGER_ENTRIES, _MAX_STEPS, _MAX_OUTPUTS, _MAX_LOG_LINES = 100, 100, 100, 40, 100
#: The page shows at most _MAX_CHUNKS chunks of the job's stream, and at most _MAX_EMITTED characters of one step's
#: text. The stream is what the steps emit while they run.
_MAX_CHUNKS, _MAX_EMITTED = 1000, 12_000
#: Seconds between two refreshes of an open page: of an unfinished job, and of an ended job.
_LIVE_SECONDS, _ENDED_SECONDS = 2, 10
#: How much `explain` reads for the page: `entries` of the ledger, waiting `steps`, and tasks or jobs `ahead` of the
#: job. The page reads less than the endpoint, because the page of an unfinished job is refreshed every two seconds.
_DEPTH = Depth(entries=1000, steps=20, ahead=1000)
#: The headers of a picture. A browser that opens it runs nothing in it, and may keep it for ten minutes.
_PICTURE_HEADERS = {"Content-Security-Policy": "default-src 'none'; sandbox", "Cache-Control": "private, max-age=600"}
#: Types of pictures that browsers show, and that cannot contain a script.
_PICTURES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "image/avif"})


@router.get("/jobs/{job_id}")
async def show_job(request: Request, job_id: UUID, caller: Reader) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id)  # the job's row and kind; raises NotFound or Gone
    # `acting_caller`: the caller, with the job's tenant in place of the tenant of an operator's key.
    tenant_id, now = access.acting_caller.tenant_id, datetime.now(UTC)
    body = answer(access)
    steps, outputs = body["steps"], body["outputs"]
    has_ended = access.row["status"] in JOB_TERMINAL
    # `made_of`: the values on which the page of an ended job depends. If they have not changed since the last refresh,
    # the page has not changed. The refresh then ends here and has read only the job's row. It must read this row,
    # because somebody else may retry or delete the job. For an unfinished job `made_of` is empty, and each refresh
    # renders the page anew.
    made_of = (endpoints.etag_of(services, access, body), caller.scopes) if has_ended else ()
    if (no_content := unchanged(request, made_of)) is not None:
        return no_content
    job = with_links(services, access, body | {"outputs": outputs[:_MAX_OUTPUTS]})
    explanation = await explain(services, tenant_id, access.row, _DEPTH)
    ledger = explanation["ledger"]
    is_ledger_cut = len(ledger) == _DEPTH.entries  # if so, there may be earlier entries that were not read
    async with services.pool.acquire() as connection:
        details = await _read_details(request, connection, caller, access)
    return page(
        request,
        "job.html",
        made_of=made_of,
        refresh_seconds=_ENDED_SECONDS if has_ended else _LIVE_SECONDS,
        refresh_url=str(request.url.path),
        job=job,
        kind=access.kind,
        steps=steps[:_MAX_STEPS],
        more_steps=_more(steps, _MAX_STEPS, job_reads.MAX_STEPS),
        more_outputs=_more(outputs, _MAX_OUTPUTS, job_reads.MAX_OUTPUTS),
        read_at=f"GET /v1/{'runs' if access.row['is_run'] else 'jobs'}/{access.id}",
        ended=has_ended,
        why=explanation,
        waits=details.waits,
        may_answer=caller.tenant_id == tenant_id and RUNS_WRITE in caller.scopes,
        timeline=timeline(job, steps, ledger, details.tasks, now, is_cut=is_ledger_cut),
        graph=graph_of(details.tasks),
        ledger=_with_workers(ledger, _external_steps(access))[-_MAX_LEDGER_ENTRIES:],
        more_ledger=is_ledger_cut or len(ledger) > _MAX_LEDGER_ENTRIES,
        events=list(reversed(details.events)),
        log_lines=details.log_lines[-_MAX_LOG_LINES:],
        more_log=len(details.log_lines) > _MAX_LOG_LINES,
        max_log_lines=_MAX_LOG_LINES,
        emitted=_emitted_texts(details.chunks),
        acts=details.acts,
        operations=details.operations,
        seen=access.row["event_seq"],
        pictures=[output for output in job["outputs"] if _is_picture(services, access, output)],
        may_retry=may_retry(services, access),
        payload=_editable_payload(job),
        is_writer=access.kind.scopes is not None and access.kind.scopes.write in caller.scopes,
        curl=_curl_command(services, request, access),
    )


def _more(things: Sequence[object], shown: int, at_most: int) -> str | None:
    """How many things the job has beyond the first `shown` things, as text. If `at_most` things were read, the job may
    have more, and the text ends in `+`. Returns None if the page shows all things.
    """
    if len(things) <= shown:
        return None
    return f"{len(things) - shown}{'+' if len(things) >= at_most else ''}"


@dataclass(frozen=True, slots=True)
class _Details:
    """What the page shows in addition to the job's row and its explanation. `acts`: what people did with the job.
    `operations`: the ids of the bulk operations (each acts on many jobs) that have a page. `waits`: the signals for
    which the job's workflow waits.
    """

    events: Sequence[EventView]
    tasks: Sequence[Row]
    log_lines: Sequence[Mapping[str, Any]]
    chunks: Sequence[Mapping[str, Any]]
    acts: Sequence[Act]
    operations: set[str]
    waits: Sequence[Mapping[str, Any]]


async def _read_details(request: Request, connection: Connection, caller: Caller, access: JobAccess) -> _Details:
    tenant_id = access.acting_caller.tenant_id
    events = await _latest_events(connection, access)
    acts = await acts_on(connection, tenant_id, access.id, events)
    is_unfinished_run = access.row["is_run"] and access.row["status"] not in JOB_TERMINAL
    waits = await signals.waits_of(connection, access.id, tenant_id) if is_unfinished_run else []
    return _Details(
        events=events,
        tasks=await job_reads.step_links(connection, tenant_id, access.id),
        log_lines=await log_reads.log_end(connection, tenant_id, access.id, _MAX_LOG_LINES + 1),
        chunks=await log_reads.stream_end(connection, tenant_id, access.id, _MAX_CHUNKS),
        acts=acts,
        operations=await _existing_operations(connection, caller, acts),
        waits=[_wait_of(request, access, row) for row in waits],
    )


def _wait_of(request: Request, access: JobAccess, row: Row) -> dict[str, Any]:
    """A wait of the job's workflow, for the page. `once`: the idempotency key of the wait's form, so that the form
    answers this wait only once. Each wait has its own key. If two waits for one signal had the same key, a second
    answer within a minute would count as a repetition. The workflow would not get the second answer.
    """
    wait = (row["name"], row["branch"], row["number"], row["epoch"])
    once = form_idempotency_key(request, "signal", str(access.id), *map(str, wait))
    return {"name": row["name"], "due_at": row["due_at"], "inputs": inputs_of(row["schema"]), "once": once}


async def _existing_operations(connection: Connection, caller: Caller, acts: Sequence[Act]) -> set[str]:
    """The ids of the bulk operations that the acts name and that still exist. The page links to these operations."""
    operation_ids = {UUID(act.details["operation"]) for act in acts if "operation" in act.details}
    if not operation_ids:
        return set()
    existing_ids = await operation_reads.existing(connection, tenant_of(caller), [*operation_ids])
    return {str(operation_id) for operation_id in existing_ids}


async def _latest_events(connection: Connection, access: JobAccess) -> list[EventView]:
    """The last _MAX_EVENTS events of the job, the oldest first."""
    last_skipped = max(0, access.row["event_seq"] - _MAX_EVENTS)
    return await event_reads.events_after(
        connection, access.acting_caller.tenant_id, access.id, last_skipped, _MAX_EVENTS
    )


def _external_steps(access: JobAccess) -> set[str]:
    return {step["id"] for step in access.row["steps"] or () if step["queue"].startswith(EXTERNAL)}


def _with_workers(ledger: Sequence[Mapping[str, Any]], external_steps: set[str]) -> list[Mapping[str, Any]]:
    """The ledger, with the worker's name added to each entry that the worker wrote. In the stored ledger only the claim
    of a lease names the worker.
    """
    workers = {(entry["step"], entry["epoch"]): entry["worker"] for entry in ledger if "worker" in entry}
    entries = []
    for entry in ledger:
        worker = workers.get((entry.get("step"), entry.get("epoch")))
        is_by_worker = worker is not None and _is_by_worker(entry, external_steps)
        entries.append({**entry, "worker": worker} if is_by_worker else entry)
    return entries


def _is_by_worker(entry: Mapping[str, Any], external_steps: set[str]) -> bool:
    """Whether the worker with the lease wrote the entry. The platform writes two kinds of entries itself: the end of an
    attempt whose worker was lost, and the timeout of an external step. (For other steps the worker writes the timeout.)
    """
    cause = entry.get("cause")
    is_by_platform = cause == "loss" or (cause == "timeout" and entry.get("step") in external_steps)
    return entry["kind"] in WRITTEN_BY_WORKERS and not is_by_platform


def _emitted_texts(chunks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The end of the job's stream, as pairs of a step and its text. Texts of one step that follow each other are
    joined. A chunk that is no text becomes a separate line of JSON. `(cut)` stands where an attempt has emitted too
    much.
    """
    texts: list[tuple[str, str]] = []
    for chunk in chunks:
        value = chunk.get("chunk")
        is_text = isinstance(value, str)
        text = str(value) if is_text else f"{'(cut)' if 'cut' in chunk else orjson.dumps(value).decode()}\n"
        if texts and texts[-1][0] == chunk["step"]:
            earlier_text = texts.pop()[1]
            text = earlier_text + ("" if is_text or earlier_text.endswith("\n") else "\n") + text
        texts.append((chunk["step"], text))
    return [(step, text[-_MAX_EMITTED:]) for step, text in texts]


def _editable_payload(job: Mapping[str, Any]) -> str:
    """The payload as text, for the form that changes it. The text is empty if it would be longer than _MAX_PAYLOAD, or
    if the page hides parts of the payload.
    """
    text = orjson.dumps(job["parameters"], option=orjson.OPT_INDENT_2, default=str).decode()
    return "" if job.get("redacted") or len(text) > _MAX_PAYLOAD else text


def _is_picture(services: Services, access: JobAccess, output: Mapping[str, Any]) -> bool:
    return (
        access.kind.signed_links  # whether the API gives links to the kind's outputs
        and output["content_type"] in _PICTURES
        and output["size"] <= services.settings.console_picture_bytes
    )


def _curl_command(services: Services, request: Request, access: JobAccess) -> str:
    """A command to copy. For a run with a short payload, the command starts another run with the same payload. For any
    other job, the command reads the job.
    """
    base = services.settings.public_url or f"{request.url.scheme}://{request.url.netloc}"
    curl = 'curl -s -H "Authorization: Bearer $LEASEHOLD_API_KEY"'
    if access.row["is_run"]:
        body = {"template": access.row["template"], "version": access.row["version"], "payload": access.row["params"]}
        data = shlex.quote(orjson.dumps(body).decode())
        if len(data) <= _MAX_PAYLOAD:
            return f"{curl} -H 'Content-Type: application/json' {base}/v1/runs -d {data}"
    return f"{curl} {base}/v1/jobs/{access.id}"


@router.get("/jobs/{job_id}/outputs/{step}/{name:path}")
async def show_picture(request: Request, job_id: UUID, step: str, name: str, caller: Reader) -> Response:
    """A picture of the job. The console itself serves the picture, because pages load nothing from another origin."""
    services = services_of(request)
    access = await find(services, caller, job_id)
    for output in access.row["outputs"] or []:
        if (output["step"], output["name"]) == (step, name) and _is_picture(services, access, output):
            async with services.bodies.room(caller.tenant_id, output["size"]):  # waits for free memory
                content = await services.store.fetch_bytes(
                    output["key"], sha256=output["sha256"], max_bytes=services.settings.console_picture_bytes
                )
            return Response(content, headers=_PICTURE_HEADERS, media_type=output["content_type"])
    raise NotFound("output_not_found", "The job has no such picture.")


@router.post("/jobs/{job_id}/cancel")
async def cancel(request: Request, job_id: UUID, caller: Operator, form: Fields) -> Response:
    try:
        response = await endpoints.cancel_job(request, job_id, caller, Reason(reason=form.get("reason", "")[:500]))
    except Conflict as error:
        return await _answer_conflict(request, caller, job_id, "job.cancelled", error, "The job is cancelled.")
    status = content_of(response)["status"]
    sentence = "The job is cancelled." if status == JobState.CANCELLED else "The job was asked to stop."
    return go_to(request, f"/jobs/{job_id}", sentence)


async def _answer_conflict(
    request: Request, caller: Caller, job_id: UUID, action: str, error: Conflict, done_sentence: str
) -> Response:
    """Answer an act that the job's state does not allow any more, because the page was stale or somebody else was
    faster. The next page shows a sentence: the present state of the job, and the latest act on it. If the person
    pressed the button twice, the first press has done the act, and the sentence is `done_sentence`. Raises `error` if
    its cause is not the job's state.
    """
    if error.code != "resource_invalid_state":
        raise error
    services = services_of(request)
    access = await find(services, caller, job_id)
    async with services.pool.acquire() as connection:
        events = await _latest_events(connection, access)
        acts = await acts_on(connection, access.acting_caller.tenant_id, job_id, events, 1)
    if acts and acts[0].is_first_click(caller, action):
        return go_to(request, f"/jobs/{job_id}", done_sentence)
    sentences = [error.message, *(act.sentence for act in acts)]
    return go_to(request, f"/jobs/{job_id}", " ".join(sentences), good=False)


@router.post("/jobs/{job_id}/retry")
async def retry(request: Request, job_id: UUID, caller: Operator, form: Fields) -> Response:
    """Retry the job. Refuse the retry if the job has changed since the page with the form was made, because the person
    decided about an earlier state. For example, somebody else may have retried the job, and it has failed again.

    `seen`, a field of the form: the number of the job's last event when the page was made.
    """
    body = _retry_request(request, form)
    access = await find(services_of(request), caller, job_id, write=True)
    if body.payload == access.row["params"]:  # the form shows the payload, and the person has not changed it
        body = RetryRequest(from_step=body.from_step)
    done_sentence = "The job runs again."
    try:
        _check_seen(access, form.get("seen"))
        await endpoints.retry_job(request, job_id, caller, body)
    except Conflict as error:
        return await _answer_conflict(request, caller, job_id, "job.retried", error, done_sentence)
    return go_to(request, f"/jobs/{job_id}", done_sentence)


def _check_seen(access: JobAccess, seen_event: str | None) -> None:
    """Raises Conflict if the job has had an event after the event with the number `seen_event`. None: no check."""
    if seen_event is not None and seen_event != str(access.row["event_seq"]):
        status = str(access.row["status"]).replace("_", " ")
        raise Conflict("resource_invalid_state", f"The job has changed since you opened its page: it is {status}.")


def _retry_request(request: Request, form: Mapping[str, str]) -> RetryRequest:
    text = form.get("payload", "").strip()
    payload = typed_json(request, text) if text else None
    try:
        return RetryRequest(payload=payload, from_step=form.get("from_step") or None)
    except ValidationError as error:
        raise Invalid("invalid_payload", full_stop(f"The payload cannot be used: {error.errors()[0]['msg']}")) from None


@router.post("/jobs/{job_id}/signals/{name}")
async def signal(request: Request, job_id: UUID, name: Name, caller: Signaller, form: Fields) -> Response:
    """Send the signal for which a workflow waits. `form`: the fields of the wait's form."""
    services = services_of(request)
    async with services.pool.acquire() as connection:
        schema = await signals.schema_of(connection, job_id, caller.tenant_id, name)
    max_depth = services.settings.json_max_depth
    payload = payload_of(inputs_of(schema), form, max_depth)
    # Check the depth once more: `payload_of` has checked the JSON of each field, but in `payload` it is a level deeper.
    problem = refusal(orjson.dumps(payload), max_depth)
    if problem is not None:
        raise Invalid(problem.code, problem.detail)
    await signal_run(request, job_id, name, caller, SignalRequest(payload=payload), form.get("once") or None)
    path = f"/jobs/{job_id}" if JOBS_READ in caller.scopes else "/"
    return go_to(request, path, f"The job has your answer to {name}.")


@router.post("/jobs/{job_id}/delete")
async def delete(request: Request, job_id: UUID, caller: Deleter) -> Response:
    try:
        response = await endpoints.delete_job(request, job_id, caller)
    except Gone as error:  # a second press of the button, or somebody else was faster
        return go_to(request, "/jobs", error.message)
    must_stop_first = bool(response.body)  # 202 has a body; 204 (deleted immediately) has none
    sentence = "The job stops, and is deleted then." if must_stop_first else f"The job {job_id} is deleted."
    return go_to(request, f"/jobs/{job_id}" if must_stop_first else "/jobs", sentence)
