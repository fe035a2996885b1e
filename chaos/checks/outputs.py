"""Judges I12: the store has each output of a successful step, with the bytes that its row and its handler say."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History

#: The kind of job whose bytes differ from attempt to attempt. A store that overwrites in spite of create-only can spoil
#: only this kind: an overwrite of any other kind writes the same bytes.
_UNLIKE = "unlike"


def i12(history: History) -> Iterator[Observation]:
    """Every declared output of a success is there, with the row's size and digest, and with the reference's bytes."""
    yield from _declared(history)
    for output in history.outputs:
        stored_object = history.objects.get(output["key"])
        if stored_object is None:
            yield Observation("output", f"the object {output['key']} is not in the store")
            continue
        job = history.job_by_id.get(output["job_id"])
        is_same = (stored_object.size, stored_object.sha256) == (output["size"], output["sha256"])
        was_overwritten = output["key"] in history.overwritten and job is not None and job["pipeline"] == _UNLIKE
        yield observed(
            "output", f"{output['key']} holds other bytes than its row says", good=is_same or was_overwritten
        )
        if job is None:
            yield Observation("output", f"{output['key']} belongs to no job")
            continue
        expected_sha256 = history.expected_bytes.get((job["pipeline"], output["name"], history.text_param_of(job)))
        if expected_sha256 is not None:
            sentence = f"the bytes of {output['key']} are not those that the handlers make of the same input"
            yield observed("reference", sentence, good=stored_object.sha256 == expected_sha256)


def _declared(history: History) -> Iterator[Observation]:
    """A step that succeeded has the output that its pipeline declares."""
    stored = {(output["job_id"], output["name"]) for output in history.outputs}
    for task in history.tasks:
        job = history.job_by_id.get(task["job_id"])
        name = history.terms.writes.get((job["pipeline"], task["step"])) if job else None
        if name is not None and task["status"] == "succeeded":
            sentence = f"{history.name_of(task['id'])} succeeded without its output {name}"
            yield observed("declared output", sentence, good=(task["job_id"], name) in stored)
