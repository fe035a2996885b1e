"""Judges I2: each request makes its jobs once, however often the client repeats it, and each job has a request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Request, Row
from chaos.history import History

#: For each endpoint, the rows that its requests make. Each of these rows has the key of its request.
_RUNS, _MEDIA, _JOBS_OF_MEDIA = "runs", "media", "jobs of media"
ENDPOINTS = {
    "POST /v1/runs": _RUNS,
    "POST /v1/runs/batch": _RUNS,
    "POST /v1/operations": "operations",
    "POST /api/v1/jobs": "conversions",
    "POST /v1/images/generations": "generations",
    "POST /upload-url": _MEDIA,
    "POST /complete-upload": _JOBS_OF_MEDIA,
}
#: At these endpoints the release 0.1.0 knows no keys: it does a repeated request again.
WITHOUT_KEY_IN_RELEASE = {"POST /v1/dead-letters/replay"}
#: Kind of rows -> (tenant, key of the request) -> the ids of the rows that the request made.
_Ledgers = Mapping[str, Mapping[tuple[str, str], list[str]]]


def i2(history: History) -> Iterator[Observation]:
    """A request makes all of its jobs once, or none, however often it was repeated and whatever the answers were."""
    ledgers = _ledgers(history)
    for request in history.requests:
        has_no_key = bool(history.of_release) and request.endpoint in WITHOUT_KEY_IN_RELEASE
        if len(request.answers) > 1 and not has_no_key:
            sentence = f"the repeated {request.endpoint} with key {request.key} was answered with {request.answers}"
            yield observed(
                "repeated answer", sentence, good=len({frozenset(answer) for answer in request.answers}) == 1
            )
        if request.endpoint in ENDPOINTS:
            made = ledgers[ENDPOINTS[request.endpoint]].get((request.tenant, request.key), [])
            yield _made_once(request, made, beside_release=bool(history.of_release))
    for (tenant, key), media in ledgers[_MEDIA].items():
        yield observed("picture", f"{len(media)} media for the key {key} of {tenant}", good=len(media) == 1)
    for job, count in Counter(run["rerun_of"] for run in history.run_rows if run["rerun_of"]).items():
        yield observed("rerun", f"the run {job} was run once more {count} times", good=count == 1)
    requested = {request.key for request in history.requests} | {request.job for request in history.requests}
    names = _names(history)
    for job in history.jobs:
        sentence = f"no request made the {job['pipeline']} job {job['id']}"
        yield observed("job", sentence, good=bool(requested & (names[_subject_of(job)] | {_subject_of(job)})))


def _made_once(request: Request, made: list[str], *, beside_release: bool) -> Observation:
    """Check that the request made all of its jobs once, or none, and that its last answer names the jobs.

    `beside_release`: an API of the release may have served. It refuses the fields that it does not know, whatever an
    API of this code did at an earlier try.
    """
    if request.answer == "accepted":
        allowed_numbers = {request.jobs_requested}
    elif request.answer == "refused" and not (beside_release and request.tries > 1):
        allowed_numbers = {0}
    else:
        allowed_numbers = {0, request.jobs_requested}
    sentence = f"{request.endpoint} with key {request.key} of {request.tenant} was {request.answer} and made {made}"
    agrees = not request.answers or set(request.answers[-1]) == set(made)
    return observed(f"key at {request.endpoint}", sentence, good=len(made) in allowed_numbers and agrees)


def _ledgers(history: History) -> _Ledgers:
    ledgers: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in history.run_rows:
        if run["schedule_id"] is None and run["rerun_of"] is None:
            ledgers[_RUNS][run["tenant_id"], run["scope_id"]].append(run["job_id"])
    for job in history.jobs:
        if job["pipeline"] == "bulk_operation":
            ledgers["operations"][job["tenant_id"], _key_of(job)].append(job["id"])
    for conversion in history.conversions:
        ledgers["conversions"][conversion["tenant_id"], conversion["user_id"]].append(conversion["job_id"])
    for generation in history.generations:
        ledgers["generations"][generation["tenant_id"], generation["task_id"]].append(generation["job_id"])
    for media in history.media:
        ledgers[_MEDIA][media["tenant_id"], _stem(media)].append(media["id"])
        if media["job_id"]:
            ledgers[_JOBS_OF_MEDIA][media["tenant_id"], _stem(media)].append(media["job_id"])
    return ledgers


def _names(history: History) -> Mapping[str, set[str]]:
    """Job -> what names it in requests: a key, a schedule, or the run of which it is the rerun."""
    names: dict[str, set[str]] = defaultdict(set)
    for run in history.run_rows:
        names[run["job_id"]] |= {str(run["schedule_id"]), str(run["rerun_of"]), run["scope_id"]}
    for job in history.jobs:
        if job["pipeline"] == "bulk_operation":
            names[job["id"]].add(_key_of(job))
    for conversion in history.conversions:
        names[conversion["job_id"]].add(conversion["user_id"])
    for generation in history.generations:
        names[generation["job_id"]].add(generation["task_id"])
    for media in history.media:
        if media["job_id"]:
            names[media["job_id"]].add(_stem(media))
    return names


def _subject_of(job: Row) -> str:
    """The job itself; for a delivery of a webhook and for a withdrawal, the job that it is about."""
    if job["pipeline"] == "webhook":
        return str(job["params"]["event"]["data"]["id"])
    return str(job["params"]["job_id"] if job["pipeline"] == "generation_withdrawal" else job["id"])


def _key_of(operation: Row) -> str:
    """The key of the request that made the operation: the operation's filter finds runs by it."""
    return str(operation["params"]["filter"]).rpartition(":")[2]


def _stem(media: Row) -> str:
    return str(media["file_name"]).removesuffix(".jpg")
