"""Compares the store with the rows that name its objects, with declarations, and with the expected bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos.checks.verdict import Seen, seen
from chaos.history import History
from chaos.settings import SINGLE_PUT_BYTES

#: What a process that is killed while it probes the store leaves goes after an hour (ObjectStore.forget_probes).
_PROBES = "probe/"
#: Its bytes differ from attempt to attempt: a store that lies about create-only can lose them, and only them.
_UNLIKE = "unlike"


def i12(history: History) -> Iterator[Seen]:
    """Every declared output of a success is there, with the row's size and digest, and with the reference's bytes."""
    yield from _declared(history)
    for output in history.outputs:
        stored_object = history.objects.get(output["key"])
        if stored_object is None:
            yield Seen("output", f"{output['key']} is not in the store")
            continue
        job = history.job_by_id.get(output["job_id"])
        is_same = (stored_object.size, stored_object.sha256) == (output["size"], output["sha256"])
        was_overwritten = output["key"] in history.overwritten and job is not None and job["pipeline"] == _UNLIKE
        yield seen("output", f"{output['key']} holds other bytes than its row says", good=is_same or was_overwritten)
        if job is None:
            yield Seen("output", f"{output['key']} belongs to no job")
            continue
        expected_sha256 = history.expected_bytes.get((job["pipeline"], output["name"], history.words_of(job)))
        if expected_sha256 is not None:
            sentence = f"{output['key']} is not what the handlers make of the same input"
            yield seen("reference", sentence, good=stored_object.sha256 == expected_sha256)


def _declared(history: History) -> Iterator[Seen]:
    """A step that succeeded has the output that its pipeline declares."""
    stored = {(output["job_id"], output["name"]) for output in history.outputs}
    for task in history.tasks:
        job = history.job_by_id.get(task["job_id"])
        name = history.terms.writes.get((job["pipeline"], task["step"])) if job else None
        if name is not None and task["status"] == "succeeded":
            sentence = f"{history.name_of(task['id'])} succeeded without its output {name}"
            yield seen("declared output", sentence, good=(task["job_id"], name) in stored)


def i13(history: History) -> Iterator[Seen]:
    """No object lacks a row: it is a committed output, an upload, or what an unsuccessful job will take with it."""
    named = {output["key"] for output in history.outputs} | {media["original_key"] for media in history.media}
    named |= {key for job in history.jobs for key in job["inputs"].values()}
    # What an API stored for a job that it could not submit any more: housekeeping looks at each upload in time.
    named |= {upload["key"] for upload in history.upload_rows}
    unsuccessful = tuple(job["output_prefix"] + "/" for job in history.jobs if job["status"] != "succeeded")
    for key in sorted(history.objects):
        known = key in named or key.startswith((*unsuccessful, *_prefixes(history), _PROBES))
        yield seen("object", f"nobody knows the object {key}", good=known)


def _prefixes(history: History) -> list[str]:
    """Of uploads of several objects: their key ends with a slash."""
    return [upload["key"] for upload in history.upload_rows if upload["key"].endswith("/")]


def i14(history: History) -> Iterator[Seen]:
    """An attempt that ends leaves no upload in parts open.

    An attempt whose worker was lost may leave one, and so may one that the store never answered with the upload's id.
    """
    large = [output for output in history.outputs if output["size"] > SINGLE_PUT_BYTES]
    open_uploads = Counter(history.uploads)
    tasks = {(task["job_id"], task["step"]): task for task in history.tasks}
    for output in large:
        task = tasks[output["job_id"], output["step"]]
        sentence = f"{open_uploads[output['key']]} uploads of {output['key']} are open after {task['epoch']} attempts"
        yield seen("object in parts", sentence, good=open_uploads[output["key"]] < task["epoch"])
