"""Checks the object store (I13, I14): each object has a row, and no attempt leaves a multipart upload open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History
from chaos.settings import SINGLE_PUT_BYTES

#: The prefix of the objects with which a process tests the store. A process that is killed meanwhile leaves one:
#: housekeeping deletes it after an hour (ObjectStore.delete_old_probes).
_PROBES = "probe/"


def i13(history: History) -> Iterator[Observation]:
    """Every object has a row: an output, an upload, or an unsuccessful job, whose deletion deletes its objects."""
    named = {output["key"] for output in history.outputs} | {media["original_key"] for media in history.media}
    named |= {key for job in history.jobs for key in job["inputs"].values()}
    # An API process may have stored an upload, and then failed to submit its job. Housekeeping deletes it later.
    named |= {upload["key"] for upload in history.upload_rows}
    # The key of an upload of several objects is their prefix, and ends with a slash.
    uploads = (upload["key"] for upload in history.upload_rows if upload["key"].endswith("/"))
    unsuccessful = (job["output_prefix"] + "/" for job in history.jobs if job["status"] != "succeeded")
    prefixes = (*uploads, *unsuccessful, _PROBES)
    for key in sorted(history.objects):
        yield observed("object", f"no row names the object {key}", good=key in named or key.startswith(prefixes))


def i14(history: History) -> Iterator[Observation]:
    """An attempt that ends leaves no multipart upload open.

    An attempt may leave one if its worker was lost, or if the store's answer with the upload's id never arrived.
    """
    large = [output for output in history.outputs if output["size"] > SINGLE_PUT_BYTES]
    open_uploads = Counter(history.uploads)
    tasks = {(task["job_id"], task["step"]): task for task in history.tasks}
    for output in large:
        task = tasks[output["job_id"], output["step"]]
        sentence = f"{open_uploads[output['key']]} uploads of {output['key']} are open after {task['epoch']} attempts"
        yield observed("multipart upload", sentence, good=open_uploads[output["key"]] < task["epoch"])
