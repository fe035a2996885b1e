"""Functions that describe requests to the API: each returns a `Call`, a `Listing` or a `Feed`. `Client` and
`AsyncClient` send the requests. A parameter `key` is the idempotency key of the request; None: the client makes one.
"""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import quote
from uuid import UUID, uuid4

from leasehold.client import models
from leasehold.client.errors import ClientError

T = TypeVar("T")  # what the client makes of an answer
#: The id of a run, a job or another object of the API.
Id: TypeAlias = UUID | str
Priority: TypeAlias = Literal["high", "normal", "low"]
#: A JSON object, or the parameters of a query.
Json: TypeAlias = Mapping[str, Any]
#: What the API accepts as an idempotency key, and what HTTP accepts as the value of any other header.
_KEY = re.compile(r"[!-~](?:[ -~]{0,253}[!-~])?")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
#: The media types of the pictures that the API accepts, by the ending of the file's name. Python's `mimetypes` does not
#: know all of them on every system.
_PICTURE_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".avif": "image/avif",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".bmp": "image/bmp",
    ".heic": "image/heic",
    ".heif": "image/heif",
}


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request to the API, and how to read its answer.

    `parse`: makes the result from the JSON of the answer. `form`, `files`: the fields of a form, and the field and path
    of each of its files. `keyed`: the API accepts an idempotency key, and does nothing twice with the same `key`.
    `idempotent`: the request may be repeated without a key.

    `done_code`: the code with which the API refuses a repetition if an earlier try has done the request. None: the API
    answers a repetition as it answers the first try. `read_done`: after such a refusal, this request reads the result.
    None: the result is what `parse` makes of an answer without content.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Json = field(default_factory=dict)
    body: Json | None = None
    form: Mapping[str, str] | None = None
    files: Sequence[tuple[str, Path]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    keyed: bool = False
    idempotent: bool = False
    key: str | None = None
    done_code: str | None = None
    read_done: Call[T] | None = None

    def with_key(self) -> Call[T]:
        """The call with an idempotency key, if the API accepts one: the caller's own key, or else a new one.

        Raises ClientError for a key or a header that no request can have. Without this check, the HTTP library would
        refuse the header while it connects. The library's error would look as if the server did not answer.
        """
        for name, value in self.headers.items():
            if not _HEADER_VALUE.fullmatch(value):
                raise ClientError(f"{name} has printable ASCII characters, and none of them is a space at its ends.")
        if not self.keyed:
            return self
        key = uuid4().hex if self.key is None else self.key
        if not _KEY.fullmatch(key):
            raise ClientError("A key has 1 to 255 printable ASCII characters, and no space at its ends.")
        return replace(self, key=key, headers={**self.headers, "Idempotency-Key": key})

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again after its answer was lost."""
        return self.keyed or self.idempotent


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list. It may have few items, or none, although a page follows. `next_cursor`: the cursor of the next
    page; None: this is the last page. `searched_back_to`: the search ended early, and has not searched the jobs that
    were made at this instant (ISO 8601) or before; None: the search did not end early.
    """

    items: list[T]
    next_cursor: str | None
    searched_back_to: str | None


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A list that the API answers page by page. `items`: the field of the answer that has the items of the page."""

    path: str
    items: str
    parse: Callable[[Any], T]
    params: Json

    def page(self, cursor: str | None, *, limit: int | None = None) -> Call[Page[T]]:
        """The page after `cursor`; None: the first page. `limit`: the most items; None: the limit in `params`."""

        def parse(answer: Any) -> Page[T]:
            # An API of an earlier release answers some lists with all items, and no cursor.
            items = [self.parse(item) for item in answer[self.items]]
            return Page(items, answer.get("next_cursor"), answer.get("searched_back_to"))

        params = self.params if limit is None else {**self.params, "limit": limit}
        return _get(self.path, parse, **params, cursor=cursor)


@dataclass(frozen=True, slots=True)
class Feed(Generic[T]):
    """Numbered items that the API sends as they happen. `parse`: makes an item from the name and the data of a
    server-sent event. `after`: the number of the last item that the caller has already; 0: none.
    """

    job_id: str
    path: str
    parse: Callable[[str, Any], T]
    params: Json
    after: int


def _get(path: str, parse: Callable[[Any], T], **params: Any) -> Call[T]:
    return Call("GET", path, parse, params=_without_none(**params), idempotent=True)


def path_part(value: object) -> str:
    """A value as one part of a path. `.` and `..` are encoded, too, or else the HTTP library shortens the path."""
    part = quote(str(value), safe="")
    return part.replace(".", "%2E") if part in (".", "..") else part


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _instant_text(at: datetime | None) -> str | None:
    if at is not None and at.tzinfo is None:
        raise ValueError("scheduled_at needs a time zone")
    return None if at is None else at.isoformat()


# --- runs


def submit(
    template: str,
    payload: Json | None = None,
    *,
    version: int | None = None,
    scope: str | None = None,
    scope_id: str | None = None,
    priority: Priority = "normal",
    scheduled_at: datetime | None = None,
    delay_seconds: float | None = None,
    start_within_seconds: int | None = None,
    dedupe: str | None = None,
    tags: Mapping[str, str] | None = None,
    callback_url: str | None = None,
    key: str | None = None,
) -> Call[models.Accepted]:
    """Start a run.

    `scheduled_at`: the run starts at this time or later. `delay_seconds`, in place of `scheduled_at`: the run starts
    this many seconds after the request. If you repeat a request with the same `key`, all its fields must be the same.
    A `scheduled_at` that you compute again would differ, so use `delay_seconds`. `dedupe`: a key. If an unfinished run
    of the template has the same `dedupe` key, the API returns that run, and starts none. `callback_url`: the platform
    reports the run's end to this URL. `key`: the idempotency key; None: the client makes one.
    """
    body = _without_none(
        template=template,
        payload=dict(payload or {}),
        version=version,
        scope=scope,
        scope_id=scope_id,
        priority=priority,
        scheduled_at=_instant_text(scheduled_at),
        delay_seconds=delay_seconds,
        start_within_seconds=start_within_seconds,
        dedupe=None if dedupe is None else {"key": dedupe},
        tags=None if tags is None else dict(tags),
        callback_url=callback_url,
    )
    return Call("POST", "/v1/runs", models.Accepted.model_validate, body=body, keyed=True, key=key)


def submit_many(
    template: str,
    payloads: Iterable[Json],
    *,
    version: int | None = None,
    scope: str | None = None,
    priority: Priority = "normal",
    scheduled_at: datetime | None = None,
    tags: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Call[models.Batch]:
    """Start up to 1,000 runs of a template, one for each payload. Either all runs start, or none."""
    tag_field = {} if tags is None else {"tags": dict(tags)}
    body = _without_none(
        template=template,
        runs=[{"payload": dict(payload)} | tag_field for payload in payloads],
        version=version,
        scope=scope,
        priority=priority,
        scheduled_at=_instant_text(scheduled_at),
    )
    return Call("POST", "/v1/runs/batch", models.Batch.model_validate, body=body, keyed=True, key=key)


def with_body_fields(call: Call[T], **fields: Any) -> Call[T]:
    """The call, with these fields set in its body."""
    return replace(call, body={**(call.body or {}), **fields})


def get_run(run_id: Id, *, wait: float = 0, cursor: str | None = None) -> Call[models.Run]:
    """The run. `wait`: seconds, up to 30, to wait for the run's next change. `cursor`: the `progress.next_cursor` of
    the previous answer. With it, the answer has the next steps of a run that has more than 1,000 steps.
    """
    return _get(f"/v1/runs/{path_part(run_id)}", models.Run.model_validate, wait=wait or None, cursor=cursor)


def runs(
    *,
    template: str | None = None,
    status: models.Status | None = None,
    scope: str | None = None,
    scope_id: str | None = None,
) -> Listing[models.Run]:
    """All runs that match, the newest first."""
    params = _without_none(template=template, status=status, scope=scope, scope_id=scope_id, limit=100)
    return Listing("/v1/runs", "runs", models.Run.model_validate, params)


def rerun(run_id: Id, *, key: str | None = None) -> Call[models.Accepted]:
    """Start a new run with the same payload."""
    return Call("POST", f"/v1/runs/{path_part(run_id)}/rerun", models.Accepted.model_validate, keyed=True, key=key)


def signal(run_id: Id, name: str, payload: Any = None, *, key: str | None = None) -> Call[None]:
    """Send a signal to a run whose workflow waits for it, or will wait. The workflow consumes each signal once."""
    path = f"/v1/runs/{path_part(run_id)}/signals/{path_part(name)}"
    return Call("POST", path, lambda _answer: None, body={"payload": payload}, keyed=True, key=key)


def create_template(declaration: Json, *, key: str | None = None) -> Call[dict[str, Any]]:
    """Write a version of a template."""
    return Call("POST", "/v1/templates", dict, body=declaration, keyed=True, key=key)


# --- jobs of every kind


def get_job(job_id: Id, *, wait: float = 0) -> Call[models.Job]:
    """The job. `wait`: seconds, up to 30, to wait for the job's next change."""
    return _get(f"/v1/jobs/{path_part(job_id)}", models.Job.model_validate, wait=wait or None)


def jobs(q: str = "") -> Listing[models.Job]:
    """All jobs that the filter `q` finds, the newest first. A filter: `kind:media status:failed created:<1h`."""
    return Listing("/v1/jobs", "jobs", models.Job.model_validate, {"q": q, "limit": 100})


def explain(job_id: Id) -> Call[models.Explanation]:
    """Why the job does not run now, and what its workers did."""
    return _get(f"/v1/jobs/{path_part(job_id)}/explain", models.Explanation.model_validate)


def cancel(job_id: Id, reason: str = "") -> Call[models.JobAfterAction]:
    """Request the cancel of a job of any kind."""

    def parse(job: Any) -> models.JobAfterAction:
        """Take from the answer of `get_job` the fields that the answer to a cancel has."""
        return models.JobAfterAction(id=job["id"], status=job["status"])

    path = f"/v1/jobs/{path_part(job_id)}"
    return Call(
        "POST",
        f"{path}/cancel",
        models.JobAfterAction.model_validate,
        body={"reason": reason},
        idempotent=True,
        done_code="resource_invalid_state",
        read_done=_get(path, parse),
    )


def retry(job_id: Id, *, from_step: str | None = None, payload: Json | None = None) -> Call[models.JobAfterAction]:
    """Run a failed job again, from the step that failed or from `from_step`. `payload`: replaces the run's payload."""
    body = _without_none(from_step=from_step, payload=None if payload is None else dict(payload))
    return Call("POST", f"/v1/jobs/{path_part(job_id)}/retry", models.JobAfterAction.model_validate, body=body)


def delete(job_id: Id) -> Call[models.JobAfterAction | None]:
    """Delete a job with its objects. Returns the job if its running steps must stop first, else None."""
    path = f"/v1/jobs/{path_part(job_id)}"
    return Call("DELETE", path, _job_after_action_or_none, idempotent=True, done_code="job_deleted")


def _job_after_action_or_none(answer: Any) -> models.JobAfterAction | None:
    return models.JobAfterAction.model_validate(answer) if answer else None


def read_events(job_id: Id, *, after: int = 0, limit: int = 100) -> Call[models.EventPage]:
    """At most `limit` (1 to 500) events of a job, with numbers above `after`."""
    return _get(f"/v1/jobs/{path_part(job_id)}/events", models.EventPage.model_validate, after=after, limit=limit)


def read_logs(
    job_id: Id, *, after: int = 0, limit: int = 100, step: str | None = None, attempt: int | None = None
) -> Call[models.LogPage]:
    """What a job has logged so far: at most `limit` (1 to 1,000) lines, with numbers above `after`."""
    path = f"/v1/jobs/{path_part(job_id)}/logs"
    return _get(path, models.LogPage.model_validate, after=after, limit=limit, step=step, attempt=attempt)


def events(job_id: Id, *, after: int = 0) -> Feed[models.Event]:
    """The events of a job as they happen, up to the job's last event."""
    return Feed(
        str(job_id),
        f"/v1/jobs/{path_part(job_id)}/events",
        lambda _name, data: models.Event.model_validate(data),
        {},
        after,
    )


def logs(job_id: Id, *, after: int = 0, step: str | None = None, attempt: int | None = None) -> Feed[models.LogLine]:
    """What a job logs, as it is written, until the job ends."""
    params = _without_none(step=step, attempt=attempt)
    return Feed(
        str(job_id),
        f"/v1/jobs/{path_part(job_id)}/logs",
        lambda _name, data: models.LogLine.model_validate(data),
        params,
        after,
    )


def stream(job_id: Id, *, after: int = 0, step: str | None = None, attempt: int | None = None) -> Feed[models.Chunk]:
    """What a job emits, as it is written, until the job ends. A chunk with the event `restart` voids the earlier chunks
    of its step.
    """

    def parse(name: str, data: Any) -> models.Chunk:
        return models.Chunk.model_validate({"event": name} | data)

    return Feed(
        str(job_id), f"/v1/jobs/{path_part(job_id)}/stream", parse, _without_none(step=step, attempt=attempt), after
    )


# --- bulk operations


def operate(
    action: Literal["cancel", "retry", "delete"],
    q: str,
    *,
    canary: int = 0,
    rate: int | None = None,
    reason: str = "",
    key: str | None = None,
) -> Call[models.Operation]:
    """Start a bulk operation: a job that acts on all jobs that the filter `q` finds. `canary`: the operation
    acts on this many jobs first. If one of them is refused, fails or takes too long, the operation stops. `rate`: jobs
    a second at most. `cancel` with the operation's id aborts the operation.
    """
    body = _without_none(action=action, filter=q, canary=canary, rate=rate, reason=reason)
    return Call("POST", "/v1/operations", models.Operation.model_validate, body=body, keyed=True, key=key)


def preview(action: Literal["cancel", "retry", "delete"], q: str) -> Call[models.Preview]:
    """What `operate` would act on: a count and examples. A preview changes nothing."""
    body = {"action": action, "filter": q, "dry_run": True}
    return Call("POST", "/v1/operations", models.Preview.model_validate, body=body, keyed=True)


def get_operation(operation_id: Id) -> Call[models.Operation]:
    """The state of a bulk operation."""
    return _get(f"/v1/operations/{path_part(operation_id)}", models.Operation.model_validate)


def operations() -> Listing[models.Operation]:
    """All bulk operations, the newest first."""
    return Listing("/v1/operations", "operations", models.Operation.model_validate, {"limit": 100})


def refusals(operation_id: Id) -> Listing[models.Refusal]:
    """The jobs that a bulk operation could not act on, each with its code."""
    path = f"/v1/operations/{path_part(operation_id)}/refusals"
    return Listing(path, "refusals", models.Refusal.model_validate, {"limit": 100})


# --- dead letters


def dead_letters(
    *,
    kind: str | None = None,
    template: str | None = None,
    code: str | None = None,
    fingerprint: str | None = None,
) -> Listing[models.DeadLetter]:
    """Steps that failed for good, the latest first."""
    params = _without_none(kind=kind, template=template, code=code, fingerprint=fingerprint, limit=100)
    return Listing("/v1/dead-letters", "dead_letters", models.DeadLetter.model_validate, params)


def dead_letter_groups(*, kind: str | None = None, limit: int = 50) -> Call[list[models.DeadLetterGroup]]:
    """The latest dead letters, grouped by their cause."""

    def parse(answer: Any) -> list[models.DeadLetterGroup]:
        return [models.DeadLetterGroup.model_validate(group) for group in answer["groups"]]

    return _get("/v1/dead-letters/groups", parse, kind=kind, limit=limit)


def replay_dead_letters(
    *,
    fingerprint: str | None = None,
    template: str | None = None,
    code: str | None = None,
    canary: bool = False,
    limit: int = 100,
    key: str | None = None,
) -> Call[dict[str, Any]]:
    """Run the jobs of dead letters again. Choose the dead letters by at least one of `fingerprint`, `template` and
    `code`. The answer has the jobs that were `replayed`, and those that were `refused`, each with a reason. If a limit
    was full or the time was over, the answer also says how many jobs are `left`, and why. `canary`: replay only the
    latest dead letter.
    """
    body = _without_none(fingerprint=fingerprint, template=template, code=code, canary=canary, limit=limit)
    return Call("POST", "/v1/dead-letters/replay", dict, body=body, keyed=True, key=key)


# --- the fleet


def queues() -> Listing[models.Queue]:
    """Queues with their depth, workers and pauses. The key needs the scope `fleet:operate`."""
    return Listing("/v1/queues", "queues", models.Queue.model_validate, {})


def workers() -> Listing[models.WorkerInfo]:
    """The workers and their leases. The key needs the scope `fleet:operate`."""
    return Listing("/v1/workers", "workers", models.WorkerInfo.model_validate, {})


# --- pictures


def content_type_of(path: Path) -> str:
    """The media type for the ending of the file's name; application/octet-stream if the ending is unknown."""
    media_type = _PICTURE_TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0]
    return media_type or "application/octet-stream"


def upload_ticket(path: Path, content_type: str, *, key: str | None = None) -> Call[models.Ticket]:
    """Request a signed URL for the upload of the picture at `path`."""
    body = {"content_type": content_type, "file_name": path.name, "content_length": path.stat().st_size}
    return Call("POST", "/upload-url", models.Ticket.model_validate, body=body, keyed=True, key=key)


def put_bytes(ticket: models.Ticket, path: Path, content_type: str) -> Call[None]:
    """Upload the bytes of the picture to the object store. The request is sent without the API key."""
    headers = {"Content-Type": content_type, "Content-Length": str(path.stat().st_size)}
    return Call("PUT", ticket.upload_url, lambda _answer: None, headers=headers, idempotent=True)


def complete_upload(
    ticket: models.Ticket,
    variants: Sequence[str] = (),
    *,
    priority: Priority = "normal",
    tags: Mapping[str, str] | None = None,
) -> Call[models.PictureAccepted]:
    """Report to the API that the bytes are uploaded. The API then starts the processing of the picture."""
    body = _without_none(
        media_id=str(ticket.media_id),
        original_key=ticket.original_key,
        variants=list(variants),
        priority=priority,
        tags=None if tags is None else dict(tags),
    )
    return Call("POST", "/complete-upload", models.PictureAccepted.model_validate, body=body, idempotent=True)


def get_picture(media_id: Id, *, wait: float = 0) -> Call[models.Picture]:
    """The picture, with the links of its outputs once it is READY."""
    return _get(f"/media/{path_part(media_id)}", models.Picture.model_validate, wait=wait or None)


# --- models


def convert(
    path: Path | str,
    *,
    user_id: str,
    model_id: int,
    version: str,
    platform: str,
    reference_images: Sequence[Path | str] = (),
    options: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Call[models.Conversion]:
    """Convert the ONNX model (a neural network) at `path`. The client reads the file while it sends it.
    `platform`: the number of the chip, for example "720". `options`: further fields of the form.
    """
    form = {"user_id": user_id, "model_id": str(model_id), "version": version, "platform": platform, **(options or {})}
    files = [("model", Path(path)), *(("ref_images[]", Path(image)) for image in reference_images)]
    return Call("POST", "/api/v1/jobs", models.Conversion.model_validate, form=form, files=files, keyed=True, key=key)


# --- generations


def generate(
    prompt: str,
    *,
    what: Literal["images", "video"] = "images",
    credential: str | None = None,
    key: str | None = None,
    **order: Any,
) -> Call[models.Ordered]:
    """Order images or a video. `order`: further fields (`model`, `ratio`, `task_id`, ...). `credential`: the caller's
    own credential at the provider; None: that of the installation.
    """
    headers = {} if credential is None else {"X-Provider-Credential": credential}
    return Call(
        "POST",
        f"/v1/{what}/generations",
        lambda answer: models.Ordered.model_validate(answer["data"]),
        body={"prompt": prompt} | order,
        headers=headers,
        keyed=True,
        key=key,
    )


def get_generation(
    task_id: str, *, what: Literal["images", "video"] = "images", wait: float = 0
) -> Call[models.Generation]:
    """The state of a generation."""
    return _get(
        f"/v1/{what}/query",
        lambda answer: models.Generation.model_validate(answer["data"]),
        task_id=task_id,
        wait=wait or None,
    )
