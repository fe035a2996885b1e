"""The child process that runs isolated steps: `python -m worker.child`, started by worker/child_process.py.

It loads the handlers, gives up what it does not need, says that it is ready, and then answers one run at a
time.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import inspect
import os
import select
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import NoReturn

from pydantic import ValidationError

from leasehold.errors import Cancelled, DeclarationError, Permanent, Retryable, is_disk_full
from leasehold.pipeline import Pipeline
from leasehold.registry import Pipelines
from leasehold.verdicts import Done
from leasehold.work import Work
from worker import frames, sandbox

#: Progress is passed on this often at most, in seconds.
_SPEAK_EVERY = 0.2
#: Freed memory is kept this many seconds for the next run: to fault it in anew costs a picture a tenth of its time.
_KEEP_MEMORY = 1.0


def main() -> None:
    options = _options()
    sandbox.die_with(options.parent)
    sandbox.close_descriptors(options.channel)
    os.umask(0o077)
    try:
        pipelines, isolation = _warm_up(options)
    except Exception as error:  # noqa: BLE001 - whatever a handler's module raises refuses the start, and is told
        reason = str(error) if isinstance(error, DeclarationError) else _named(error)
        frames.send(options.channel, frames.Refused(reason=_text(reason), traceback=_traceback(error)))
        return
    gc.collect()
    gc.freeze()  # what is loaded now stays: later collections need not look at it
    frames.send(options.channel, frames.Ready(isolation=isolation))
    _serve(options.channel, pipelines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.child", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="the file descriptor of the protocol")
    parser.add_argument("--parent", type=int, required=True, help="the process id to die with")
    parser.add_argument("--source", required=True, help="module:callable that answers the registry")
    parser.add_argument("--work-dir", type=Path, required=True, help="the only tree that may be written")
    parser.add_argument("pipelines", nargs="*", help="whose handlers to load")
    return parser.parse_args()


def _warm_up(options: argparse.Namespace) -> tuple[dict[str, Pipeline], str]:
    registry = _registry(options.source)
    declared = [registry[name] for name in options.pipelines]
    modules = [options.source, *(pipeline.module for pipeline in declared)]
    packages = {module.partition(":")[0].partition(".")[0] for module in modules}
    held = sandbox.confine(sandbox.importable(packages), options.work_dir)
    loaded = {pipeline.name: _load(registry, pipeline.name) for pipeline in declared}
    held = [*sandbox.seal(), *held]
    network = {"seccomp", "netns"} & set(held)
    return loaded, "+".join(held if network else ["limits only", *held])


def _registry(source: str) -> Pipelines:
    module, _, name = source.partition(":")
    registry = getattr(importlib.import_module(module), name)()
    if not isinstance(registry, Pipelines):
        raise DeclarationError(f"{source} answered a {type(registry).__name__}, not Pipelines")
    return registry


def _load(registry: Pipelines, name: str) -> Pipeline:
    try:
        pipeline = registry.load_handlers(name)
    except ImportError as error:
        raise DeclarationError(f"pipeline {name}: {_named(error)}") from error
    for step in pipeline.steps:
        if step.isolated and inspect.iscoroutinefunction(pipeline.handlers[step.name]):
            raise DeclarationError(f"{name}.{step.name} is isolated: its handler must be a plain function")
    return pipeline


def _serve(channel: int, pipelines: dict[str, Pipeline]) -> None:
    residence = sandbox.Residence()
    try:
        while (body := frames.receive(channel)) is not None:
            _send(channel, _answer(pipelines, frames.Run.model_validate_json(body), channel))
            gc.collect()  # pictures in reference cycles would pile up, and the next run would fault in new memory
            if not _asked_within(channel, _KEEP_MEMORY):
                residence.give_back()
    except MemoryError:
        _out_of_memory()


def _asked_within(channel: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def _send(channel: int, answer: frames.Answer) -> None:
    try:
        frames.send(channel, answer)
    except frames.FrameError as error:
        frames.send(channel, _failed("permanent", "bad_output", f"the answer has {error}"))


class _Supervisor:
    """The worker, as the handler reaches it: progress goes over the channel, a cancel is a file beside `out`."""

    def __init__(self, channel: int, directory: Path) -> None:
        self._channel = channel
        self._sign = str(directory.parent / frames.CANCEL)
        self._said_at = -_SPEAK_EVERY

    def progress(self, percent: float, summary: str) -> None:
        now = monotonic()
        if now - self._said_at >= _SPEAK_EVERY:
            self._said_at = now
            said = frames.Progress(percent=min(max(float(percent), 0.0), 100.0), summary=_text(summary)[:500])
            frames.send(self._channel, said)

    def cancelled(self) -> bool:
        return os.path.exists(self._sign)  # noqa: PTH110 - asked in inner loops, and half as dear


def _answer(pipelines: dict[str, Pipeline], run: frames.Run, channel: int) -> frames.Answer:
    try:
        pipeline = pipelines[run.pipeline]
        work = _work(pipeline, run, channel)
        _enter(work.directory)
        return _finished(pipeline.handlers[run.step](work), work.directory)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit too: the child outlives whatever a handler raises
        return _told(error)
    finally:
        os.chdir("/")
        _flush()


def _work(pipeline: Pipeline, run: frames.Run, channel: int) -> Work:
    try:
        params = pipeline.params.model_validate(run.params)
    except ValidationError as error:
        raise Permanent("bad_params", str(error)) from error
    files = {name: Path(path) for name, path in run.files.items()}
    directory = Path(run.directory)
    return Work(run.pipeline, run.step, params, files, directory, run.item, _Supervisor(channel, directory))


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
        return _failed("permanent", "bad_output", _named(error))


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
    return _failed("retryable", "handler_error", _named(error), error=error)


def _failed(
    kind: str, code: str, message: str, *, after: timedelta | None = None, error: BaseException | None = None
) -> frames.Failed:
    return frames.Failed(
        error="permanent" if kind == "permanent" else "retryable",
        code=_text(code)[:200] or "unnamed",
        message=_text(message),
        after=None if after is None else min(max(0.0, after.total_seconds()), frames.MAX_AFTER),
        traceback="" if error is None else _traceback(error),
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _text(text: str) -> str:
    """Bounded, and free of lone surrogates, which have no UTF-8 form."""
    return text[: frames.MAX_TEXT].encode("utf-8", "replace").decode()


def _traceback(error: BaseException) -> str:
    whole = "".join(traceback.format_exception(error))
    return whole[-frames.MAX_TRACEBACK :].encode("utf-8", "replace").decode()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a handler may have closed them
            stream.flush()


def _out_of_memory() -> NoReturn:
    os.write(2, b"out of memory\n")
    os._exit(frames.OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
