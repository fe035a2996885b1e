"""What the fuzzer's requests are about: real things in the state that an operation needs, made over HTTP as clients do.

What a client alone cannot make (a finished picture, a conversion's result, a worker) the test makes in the rows, and
names in LEASEHOLD_FUZZ_THINGS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import cycle
from typing import Any
from uuid import uuid4

import httpx2

TEMPLATE, SWITCHED, QUEUE, WORKER, PROVIDER = "fuzzed", "switched", "fuzz", "fuzzer", "jimeng"
HOOK = "http://127.0.0.1/hook"
#: A filter that finds no job of a test.
NOTHING = "created:>99w"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


class Things:
    """Each method makes one and gives what the operation's parameters need. Raises AssertionError where it cannot."""

    def __init__(self, url: str, key: str, made: str) -> None:
        self._http = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=40)
        self._lasting: dict[str, Subject] = {}
        #: Ids of what other requests are about still: nobody deletes it.
        self.lasting: set[str] = set()
        self._made = {kind: cycle(names) for kind, names in json.loads(made).items()}
        for kind in (TEMPLATE, SWITCHED):
            step = {"id": "only", "worker_type": "external", "queue": QUEUE}
            self._post("/v1/templates", {"type": kind, "steps": [step]})

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: dict[str, Any] | None = None, **more: Any) -> Any:
        answer = self._http.post(path, json=body, **more) if body is not None else self._http.post(path, **more)
        assert answer.is_success, (path, answer.status_code, answer.text)
        return answer.json()

    def made(self, kind: str) -> str:
        return str(next(self._made[kind]))

    # --- runs

    def run(self) -> str:
        return str(self._post("/v1/runs", {"template": TEMPLATE})["id"])

    def operation(self) -> str:
        return str(self._post("/v1/operations", {"action": "cancel", "filter": f"{NOTHING} tenant:acme"})["id"])

    def leased(self) -> dict[str, Any]:
        run = self.run()
        claimed = self._post("/v1/external/claim", {"worker_id": WORKER, "queues": [QUEUE]})
        assert claimed["tasks"], self._http.get(f"/v1/runs/{run}/explain").text
        task: dict[str, Any] = claimed["tasks"][0]
        return task

    def stopping(self) -> dict[str, Any]:
        task = self.leased()
        self._post(f"/v1/runs/{task['run_id']}/cancel")
        return task

    def failed(self) -> dict[str, Any]:
        task = self.leased()
        said = {"worker_id": WORKER, "epoch": task["epoch"], "retryable": False}
        self._post(f"/v1/external/tasks/{task['task_id']}/fail", said)
        return task

    def cancelled(self) -> str:
        run = self.run()
        self._post(f"/v1/runs/{run}/cancel")
        return run

    def template(self) -> str:
        steps = [{"id": "only", "worker_type": "external", "queue": QUEUE}]
        return str(self._post("/v1/templates", {"type": f"t{uuid4().hex}", "steps": steps})["type"])

    def schedule(self) -> str:
        return str(self._post("/v1/schedules", {"template": TEMPLATE, "cron": "0 0 1 1 *"})["id"])

    def webhook(self) -> str:
        return str(self._post("/v1/webhooks", {"url": HOOK})["id"])

    def view(self) -> str:
        answer = self._http.put("/v1/views", json={"name": uuid4().hex, "filter": NOTHING})
        assert answer.is_success, answer.text
        return str(answer.json()["id"])

    def delivery(self) -> Subject:
        hook = self.webhook()
        sent = self._post(f"/v1/webhooks/{hook}/test")
        return Subject(path={"webhook_id": hook, "delivery_id": str(sent["id"])})

    def key(self) -> str:
        return str(self._post("/v1/keys", {"client_id": "made", "role": "viewer"})["prefix"])

    def limit(self) -> str:
        tenant = f"lifted-{uuid4()}"
        assert self._http.put("/v1/limits", json={"tenant_id": tenant, "key": "tenant", "at_most": 1}).is_success
        return tenant

    # --- other kinds

    def generation(self, kind: str, *, ended: bool = False) -> str:
        """`kind`: images or video."""
        order = self._post(f"/v1/{kind}/generations", {"prompt": "x", "provider": PROVIDER})
        task_id = str(order["data"]["task_id"])
        if ended:
            self._post(f"/v1/{kind}/cancel", {"task_id": task_id})
        return task_id

    def conversion(self, *, ended: bool = False) -> str:
        form = {"user_id": str(uuid4()), "model_id": "1", "version": "0001", "platform": "720"}
        job = str(self._post("/api/v1/jobs", data=form, files={"model": ("m.onnx", b"x")})["job_id"])
        if ended:
            self._post(f"/api/v1/jobs/{job}/cancel")
        return job

    def uploaded(self) -> dict[str, Any]:
        wanted = {"content_type": "image/png", "file_name": "a.png", "content_length": len(PNG)}
        ticket: dict[str, Any] = self._post("/upload-url", wanted)
        put = httpx2.put(ticket["upload_url"], content=PNG, headers={"Content-Type": "image/png"}, timeout=40)
        assert put.is_success, put.text
        return {name: ticket[name] for name in ("media_id", "original_key")}

    def picture(self) -> str:
        uploaded = self.uploaded()
        self._post("/complete-upload", uploaded)
        return str(uploaded["media_id"])

    # --- what an operation is asked about

    def about(self, operation: str) -> Subject:
        """What the parameters and members of a request to the operation may name."""
        making = _PATHS.get(operation) or _QUERIES.get(operation) or _BODIES.get(operation)
        if making is None:
            return Subject()
        if operation not in _LASTS:
            return making(self)
        if operation not in self._lasting:
            self._lasting[operation] = making(self)
            self.lasting.update(str(value) for value in self._lasting[operation].path.values())
        return self._lasting[operation]

    def of_task(self, task: dict[str, Any]) -> Subject:
        held = {"worker_id": WORKER, "epoch": task["epoch"]}
        return Subject(path={"task_id": task["task_id"]}, body=held)


@dataclass(frozen=True, slots=True)
class Subject:
    path: dict[str, Any] = field(default_factory=dict)
    query: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


Making = Callable[[Things], Subject]


def _path(name: str, make: Callable[[Things], str], /, **body: Any) -> Making:
    return lambda things: Subject(path={name: make(things)}, body=body)


def _kind(kind: str, version: int | None = None) -> Making:
    return lambda _: Subject(path={"kind": kind} | ({} if version is None else {"version": version}))


def _body(**body: Any) -> Making:
    return lambda _: Subject(body=body)


def _past() -> dict[str, str]:
    now = datetime.now(UTC)
    return {"start": (now - timedelta(days=2)).isoformat(), "end": (now - timedelta(days=1)).isoformat()}


def _after(make: Callable[[Things], object], **body: Any) -> Making:
    def made(things: Things) -> Subject:
        make(things)
        return Subject(body=body)

    return made


#: What is asked leaves the thing as it is, so one is enough.
_LASTS = frozenset({
    "getRun", "explainRun", "rerunRun", "streamRunEvents", "getSchedule", "changeSchedule", "runScheduleNow",
    "backfillSchedule", "streamConversionEvents", "changeWebhook", "rotateWebhookSecret", "listDeliveries",
    "redeliverWebhook",
    "getJob", "explainJob", "streamJobEvents", "getOperation", "listRefusals",
    "queryImages", "queryVideo", "postImagesQuery", "postVideoQuery", "streamImagesEvents", "streamVideoEvents",
})  # fmt: skip

_finished = _path("job_id", lambda things: things.made("conversions"))
_PATHS: dict[str, Making] = {
    "getRun": _path("run_id", Things.run),
    "explainRun": _path("run_id", Things.run),
    "cancelRun": _path("run_id", Things.run),
    "signalRun": _path("run_id", Things.run, name="go"),
    "rerunRun": _path("run_id", Things.run),
    "retryRun": _path("run_id", lambda things: str(things.failed()["run_id"]), from_step="only"),
    "streamRunEvents": _path("run_id", Things.cancelled),
    "getJob": _path("job_id", Things.run),
    "explainJob": _path("job_id", Things.run),
    "streamJobEvents": _path("job_id", Things.cancelled),
    "cancelJob": _path("job_id", Things.run),
    "retryJob": _path("job_id", lambda things: str(things.failed()["run_id"]), from_step="only", payload=None),
    "deleteJob": _path("job_id", Things.cancelled),
    "getOperation": _path("operation_id", Things.operation),
    "listRefusals": _path("operation_id", Things.operation),
    "getMedia": _path("media_id", lambda things: things.made("media")),
    "deleteMedia": _path("media_id", Things.picture),
    "streamMediaEvents": _path("media_id", lambda things: things.made("media")),
    "listTemplateVersions": _kind(TEMPLATE),
    "getTemplate": _kind(TEMPLATE, 1),
    "enableTemplate": _kind(SWITCHED, 1),
    "deleteTemplate": lambda things: Subject(path={"kind": things.template(), "version": 1}),
    "getSchedule": _path("schedule_id", Things.schedule),
    "changeSchedule": _path("schedule_id", Things.schedule, cron="@weekly", timezone="Asia/Kolkata"),
    "deleteSchedule": _path("schedule_id", Things.schedule),
    "runScheduleNow": _path("schedule_id", Things.schedule),
    "backfillSchedule": lambda things: Subject(path={"schedule_id": things.schedule()}, body=_past()),
    "getConversion": _finished,
    "getConversionResult": _finished,
    "promoteConversion": _finished,
    "cancelConversion": _path("job_id", Things.conversion),
    "streamConversionEvents": _path("job_id", lambda things: things.conversion(ended=True)),
    "heartbeatExternal": lambda things: things.of_task(things.leased()),
    "progressExternal": lambda things: things.of_task(things.leased()),
    "completeExternal": lambda things: things.of_task(things.leased()),
    "failExternal": lambda things: things.of_task(things.leased()),
    "announceExternalFiles": lambda things: things.of_task(things.leased()),
    "logExternal": lambda things: things.of_task(things.leased()),
    "emitExternal": lambda things: things.of_task(things.leased()),
    "releaseExternal": lambda things: things.of_task(things.leased()),
    "acknowledgeCancelExternal": lambda things: things.of_task(things.stopping()),
    "replayDeadLetter": _path("task_id", lambda things: str(things.failed()["task_id"]), from_step="only"),
    "rotateKey": _path("prefix", Things.key, overlap_seconds=0),
    "expireKey": _path("prefix", Things.key, in_seconds=60),
    "revokeKey": _path("prefix", Things.key),
    "changePerson": _path("person_id", lambda things: things.made("people"), disabled=None),
    "endSessions": _path("person_id", lambda things: things.made("people")),
    "drainWorker": _path("worker_id", lambda things: things.made("workers")),
    "getScaling": lambda _: Subject(path={"pool": "default"}),
    "liftLimit": lambda things: Subject(path={"tenant_id": things.limit(), "key": "tenant"}),
    "changeWebhook": _path("webhook_id", Things.webhook, url=HOOK),
    "testWebhook": _path("webhook_id", Things.webhook),
    "redeliverWebhook": lambda things: things.delivery(),
    "deleteView": _path("view_id", Things.view),
    "deleteWebhook": _path("webhook_id", Things.webhook),
    "rotateWebhookSecret": _path("webhook_id", Things.webhook),
    "listDeliveries": _path("webhook_id", Things.webhook),
}
_QUERIES: dict[str, Making] = {
    "listJobs": lambda _: Subject(query={"q": "status:failed created:<1h"}),
    "listDeadLetters": lambda _: Subject(query={"kind": "run"}),
    "findInCells": lambda things: Subject(query={"job": things.run(), "tenant": None}),
    "findInOwnCell": lambda _: Subject(query={"job": None, "tenant": "acme"}),
    "queryImages": lambda things: Subject(query={"task_id": things.generation("images")}),
    "queryVideo": lambda things: Subject(query={"task_id": things.generation("video")}),
    "streamImagesEvents": lambda things: Subject(query={"task_id": things.generation("images", ended=True)}),
    "streamVideoEvents": lambda things: Subject(query={"task_id": things.generation("video", ended=True)}),
}
_RUNS = {"template": TEMPLATE, "version": None}
_BODIES: dict[str, Making] = {
    "createOperation": _body(filter=NOTHING),
    "createRun": _body(**_RUNS),
    "createRuns": _body(**_RUNS),
    "createSchedule": _body(**_RUNS, cron="@daily", timezone="Europe/Berlin"),
    "createWebhook": _body(url=HOOK),
    "createUploadUrl": _body(content_type="image/png", content_length=len(PNG)),
    "completeUpload": lambda things: Subject(body=things.uploaded()),
    "generateImages": _body(provider=PROVIDER, task_id=None),
    "generateVideo": _body(provider=PROVIDER, task_id=None),
    "cancelImages": lambda things: Subject(body={"task_id": things.generation("images")}),
    "cancelVideo": lambda things: Subject(body={"task_id": things.generation("video")}),
    "postImagesQuery": lambda things: Subject(body={"task_id": things.generation("images")}),
    "postVideoQuery": lambda things: Subject(body={"task_id": things.generation("video")}),
    "claimExternal": _after(Things.run, queues=[QUEUE]),
    "replayDeadLetters": _after(Things.failed, template=TEMPLATE, code=None, fingerprint=None, kind=None),
}


def from_environment() -> Things:
    return Things(
        os.environ["LEASEHOLD_FUZZ_URL"],
        os.environ["LEASEHOLD_FUZZ_KEY"],
        os.environ["LEASEHOLD_FUZZ_THINGS"],
    )
