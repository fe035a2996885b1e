"""Compares the objects of the store with the rows that name them, with the pipelines' declarations, and with the bytes
that the handlers make (I12 to I14).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History
from chaos.settings import SINGLE_PUT_BYTES

#: The prefix of the objects with which a process probes the store. A process that is killed meanwhile leaves one, and
#: housekeeping deletes it after an hour (ObjectStore.forget_probes).
_PROBES = "probe/"
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
        expected_sha256 = history.expected_bytes.get((job["pipeline"], output["name"], history.words_of(job)))
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


def i13(history: History) -> Iterator[Observation]:
    """Every object has a row: of an output, of an upload, or of an unsuccessful job, whose deletion removes it."""
    named = {output["key"] for output in history.outputs} | {media["original_key"] for media in history.media}
    named |= {key for job in history.jobs for key in job["inputs"].values()}
    # An API may have stored an upload for a job that it then could not submit. Housekeeping checks each upload in time.
    named |= {upload["key"] for upload in history.upload_rows}
    # The key of an upload of several objects is their prefix, and ends with a slash.
    uploads = (upload["key"] for upload in history.upload_rows if upload["key"].endswith("/"))
    unsuccessful = (job["output_prefix"] + "/" for job in history.jobs if job["status"] != "succeeded")
    prefixes = (*uploads, *unsuccessful, _PROBES)
    for key in sorted(history.objects):
        yield observed("object", f"no row names the object {key}", good=key in named or key.startswith(prefixes))


def i14(history: History) -> Iterator[Observation]:
    """An attempt that ends leaves no upload in parts open.

    An attempt may leave one if its worker was lost, or if the store's answer with the upload's id never arrived.
    """
    large = [output for output in history.outputs if output["size"] > SINGLE_PUT_BYTES]
    open_uploads = Counter(history.uploads)
    tasks = {(task["job_id"], task["step"]): task for task in history.tasks}
    for output in large:
        task = tasks[output["job_id"], output["step"]]
        sentence = f"{open_uploads[output['key']]} uploads of {output['key']} are open after {task['epoch']} attempts"
        yield observed("object in parts", sentence, good=open_uploads[output["key"]] < task["epoch"])
