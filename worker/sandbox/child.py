"""A child process: what the zygote becomes after a fork. It does one run of one step, and ends."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Literal, NoReturn

from pydantic import ValidationError

from leasehold.domain.errors import Cancelled, Permanent, Retryable, is_disk_full
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from leasehold.worker.sandbox import fences as sandbox
from leasehold.worker.sandbox import frames

#: Progress is passed on this often at most, in seconds.
_SPEAK_EVERY = 0.2

_Kind = Literal["permanent", "retryable", "unforeseen"]


def live(pipeline: Pipeline, fences: sandbox.Fences, zygote: int, channel: int, output: int) -> NoReturn:
    """Be a child to the end: never returns into the zygote's code.

    `channel`: the descriptor of the protocol; `output`: that of what it prints.
    """
    status = 1
    try:
        sandbox.die_with(zygote)
        os.setsid()
        _take(channel, output)
        fences.seal()
        _run(pipeline, fences)
        status = 0
    except MemoryError:
        os.write(2, b"out of memory\n")
        status = frames.OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - a fence that was refused, a channel that broke: there is no run
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(status)


def _take(channel: int, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(channel, frames.CHANNEL)
    sandbox.close_descriptors(frames.CHANNEL)


def _run(pipeline: Pipeline, fences: sandbox.Fences) -> None:
    """The place is the worker's own word; all fences stand before anything of a client's is read."""
    if (body := frames.receive(frames.CHANNEL)) is None:
        return
    place = frames.Place.model_validate_json(body)
    fences.enclose([Path(path) for path in place.files], Path(place.directory))
    if (body := frames.receive(frames.CHANNEL)) is None:
        return
    answer = _answer(pipeline, frames.Run.model_validate_json(body))
    try:
        frames.send(frames.CHANNEL, answer)
    except frames.FrameError as error:
        frames.send(frames.CHANNEL, _failed("permanent", "bad_output", f"the answer has {error}"))
    frames.receive(frames.CHANNEL)  # the worker looks at what it has held, and ends it


class _Supervisor:
    """The worker, as the handler reaches it: progress goes over the channel, a cancel is a file beside `out`."""

    def __init__(self, directory: Path) -> None:
        self._sign = str(directory.parent / frames.CANCEL)
        self._said_at = -_SPEAK_EVERY

    def progress(self, percent: float, summary: str) -> None:
        now = monotonic()
        if now - self._said_at >= _SPEAK_EVERY:
            self._said_at = now
            said = frames.Progress(percent=min(max(float(percent), 0.0), 100.0), summary=bounded(summary)[:500])
            frames.send(frames.CHANNEL, said)

    def cancelled(self) -> bool:
        return os.path.exists(self._sign)  # noqa: PTH110 - asked in inner loops, and half as dear


def _answer(pipeline: Pipeline, run: frames.Run) -> frames.Answer:
    try:
        work = _work(pipeline, run)
        _enter(work.directory)
        return _finished(pipeline.handlers[run.step](work), work.directory)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: whatever a handler raises is its answer
        return _told(error)
    finally:
        _flush()


def _work(pipeline: Pipeline, run: frames.Run) -> Work:
    try:
        params = pipeline.params.model_validate(run.params)
    except ValidationError as error:
        raise Permanent("bad_params", str(error)) from error
    files = {name: Path(path) for name, path in run.files.items()}
    directory = Path(run.directory)
    return Work(run.pipeline, run.step, params, files, directory, run.item, _Supervisor(directory))


def _enter(directory: Path) -> None:
    os.chdir(directory)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


def _finished(done: object, directory: Path) -> frames.Answer:
    if not isinstance(done, Done):
        raise TypeError(f"the handler answered a {type(done).__name__}, not Done")
    try:
        files = {
            name: frames.Made(path=os.path.relpath(directory / made.path, directory), content_type=made.content_type)
            for name, made in done.files.items()
        }
        value = None if done.value is None else dict(done.value)
        return frames.Finished(files=files, value=value)
    except ValidationError as error:
        return _failed("permanent", "bad_output", named(error))


def _told(error: BaseException) -> frames.Failed:
    """Translate the handler's exception into what the parent will raise."""
    if isinstance(error, Cancelled):
        return frames.Failed(error="cancelled", code="cancelled", message="")
    if isinstance(error, Permanent):
        return _failed("permanent", error.code, error.message)
    if isinstance(error, Retryable):
        return _failed("retryable", error.code, error.message, after=error.after)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return _failed("permanent", "file_limit", "a file grew past the step's size limit", error=error)
    if is_disk_full(error):
        return _failed("retryable", "disk_full", "the disk of the worker is full", error=error)
    return _failed("unforeseen", "handler_error", named(error), error=error)


def _failed(
    kind: _Kind, code: str, message: str, *, after: timedelta | None = None, error: BaseException | None = None
) -> frames.Failed:
    return frames.Failed(
        error=kind,
        code=bounded(code)[:200] or "unnamed",
        message=bounded(message),
        after=None if after is None else min(max(0.0, after.total_seconds()), frames.MAX_AFTER),
        traceback="" if error is None else formatted(error),
    )


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def bounded(text: str) -> str:
    """Bounded, and free of lone surrogates, which have no UTF-8 form."""
    return text[: frames.MAX_TEXT].encode("utf-8", "replace").decode()


def formatted(error: BaseException) -> str:
    whole = "".join(traceback.format_exception(error))
    return whole[-frames.MAX_TRACEBACK :].encode("utf-8", "replace").decode()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a handler may have closed them
            stream.flush()
