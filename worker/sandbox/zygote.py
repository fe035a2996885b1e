"""The zygote of one pipeline: `python -m leasehold.worker.sandbox.zygote`, started by worker/sandbox/zygote_process.py.

The zygote raises its fences (the mechanisms of the sandbox), loads the handlers, and then only forks: one child for
each run. The zygote never reads a client's bytes, so all its children start from the same clean state.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.registry import Pipelines, object_at
from leasehold.runtime.child_imports import import_of_child
from leasehold.runtime.foreign_errors import text_of
from leasehold.worker.sandbox import child, fences, frames


def main() -> None:
    gc.disable()  # until all is loaded, because a collection of new modules finds no garbage
    options = _options()
    fences.die_with(options.parent)
    fences.close_descriptors(options.control)  # all except `control` and the standard ones
    os.umask(0o077)
    control = socket.socket(fileno=options.control)
    sys.path[:] = options.import_path
    try:
        with import_of_child():
            registry = _registry(options.source, options.module)
        packages = _packages(options.source, registry[options.pipeline].module)  # the code that children may read
        own_fences = fences.Fences.around(packages, options.work_dir)  # confines this process
        pipeline = _load(registry, options.pipeline)
    except Exception as error:  # noqa: BLE001 - a handler's module may raise anything: report it and do not start
        reason = str(error) if isinstance(error, DeclarationError) else text_of(error)
        refused = frames.Refused(reason=child.bounded(reason), traceback=child.bounded_traceback(error))
        control.send(refused.model_dump_json().encode())
        return
    fences.hide_memory()
    ready = frames.Ready(isolation=own_fences.isolation, threads=fences.threads())
    control.send(ready.model_dump_json().encode())
    _preload(pipeline)  # after the answer: the worker serves meanwhile, and only its first run waits for the preload
    gc.collect()
    gc.freeze()  # children share this memory; a collection would write to the memory, and so make copies of it
    gc.enable()
    _serve(control, pipeline, own_fences)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m leasehold.worker.sandbox.zygote", description=__doc__)
    parser.add_argument("--control", type=int, required=True, help="the file descriptor of the worker's requests")
    parser.add_argument("--parent", type=int, required=True, help="the process id to die with")
    parser.add_argument("--source", required=True, help="module:callable that returns the registry of pipelines")
    parser.add_argument("--module", action="append", default=[], help="to import before the registry is made")
    parser.add_argument("--work-dir", type=Path, required=True, help="the folder with the directories of all runs")
    parser.add_argument("--import-path", action="append", required=True, help="an entry of the worker's sys.path")
    parser.add_argument("pipeline", help="whose handlers to load")
    return parser.parse_args()


def _registry(source: str, modules: Sequence[str]) -> Pipelines:
    """The registry of `source`, after the import of `modules`, which declare tasks of an app that `source` names. The
    module of `source` is imported first, because `modules` may need it.
    """
    if modules:
        object_at(source)
        for module in modules:
            importlib.import_module(module)
    return Pipelines.from_source(source)


def _packages(*modules: str) -> set[str]:
    """The top-level packages of these modules. A module may have the form "module:callable"."""
    return {module.partition(":")[0].partition(".")[0] for module in modules}


def _load(registry: Pipelines, name: str) -> Pipeline:
    try:
        pipeline = registry.load_handlers(name)
    except ImportError as error:
        raise DeclarationError(f"pipeline {name}: {text_of(error)}") from error
    for step in pipeline.steps:
        if step.isolated and inspect.iscoroutinefunction(pipeline.handlers[step.name]):
            raise DeclarationError(f"{name}.{step.name} is isolated: its handler must be a plain function")
    return pipeline


def _preload(pipeline: Pipeline) -> None:
    """Load the modules that handlers import when they run. If a module cannot be loaded, the runs that need it fail."""
    for module in pipeline.preload:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a library may raise anything; runs that do not need it still work
            sys.stderr.write(f"preload of {module}: {text_of(error)}\n")


def _serve(control: socket.socket, pipeline: Pipeline, own_fences: fences.Fences) -> None:
    """Fork and reap children at the worker's requests, until the worker closes the channel. A request is one number:
    FORK, with the descriptors of the child's channel and output, or the process id of a child to reap. The zygote reaps
    an ended child only when the worker requests its status. Until then the system does not reuse the child's process
    id.
    """
    zygote = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, frames.NUMBER.size, 2)
        if not request:
            return
        (number,) = frames.NUMBER.unpack(request)
        if number != frames.FORK:
            status = os.waitpid(number, 0)[1]
            control.send(frames.NUMBER.pack(os.waitstatus_to_exitcode(status)))
            continue
        _flush()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)  # a negative answer: there is no child
        if pid == 0:
            # `live` closes this descriptor, and may give its number to a descriptor that must stay open. So the socket
            # object must not close that number later.
            control.detach()
            child.live(pipeline, own_fences, zygote, *descriptors)  # never returns
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(frames.NUMBER.pack(pid))


def _flush() -> None:
    """Empty the buffers before a fork. Otherwise the child would print their contents a second time."""
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    main()
