"""The evaluator's child process: reads questions from stdin, writes answers to stdout, and knows nothing else.

A question starts a timer of CPU seconds, which the kernel ends with SIGPROF: the default of that signal kills the
process, in whatever library it is just then. CPU seconds, because a busy machine must not refuse an honest payload.
The parent also looks at the clock on the wall, for a child that is stopped or starved.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections import OrderedDict
from typing import Any, BinaryIO

import orjson
from jsonschema_rs import Draft202012Validator, ReferencingError, ValidationError

from leasehold.evaluation.cost import InPlaceCycle, expanded_size
from leasehold.evaluation.flat import compiled

#: Bytes that follow, and CPU seconds for the answer.
QUESTION = struct.Struct(">Id")
ANSWER = struct.Struct(">I")
#: The environment's names that Python and its libraries need; everything else, secrets above all, stays behind.
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")

_VALIDATORS = 64
_DEEP = 100_000  # chains of references are counted recursively, by pure Python, which needs no stack of C for it
_MOST_SAID = 300


def main(memory_bytes: int) -> None:
    """Serve until stdin ends."""
    _confine(memory_bytes)
    sys.setrecursionlimit(_DEEP)
    asked, said = sys.stdin.buffer, sys.stdout.buffer
    known: OrderedDict[str, Draft202012Validator] = OrderedDict()
    while (header := asked.read(QUESTION.size)) and len(header) == QUESTION.size:
        size, cpu_seconds = QUESTION.unpack(header)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = orjson.dumps(_answer(known, asked, size))
        signal.setitimer(signal.ITIMER_PROF, 0)
        said.write(ANSWER.pack(len(answer)) + answer)
        said.flush()


def _confine(memory_bytes: int) -> None:
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # some event loops hand more to a child than said
    for kind, bound in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(kind, (bound, bound))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's group: the parent ends its children itself


def _answer(known: OrderedDict[str, Draft202012Validator], asked: BinaryIO, size: int) -> dict[str, Any]:
    question = orjson.loads(asked.read(size))
    name = question["name"]
    if "schema" in question:
        try:
            if "most" in question and (cost := expanded_size(question["schema"])) > question["most"]:
                return {"cost": cost}
            known[name] = compiled(question["schema"])
        except InPlaceCycle:
            return {"cycle": True}
        except (ValidationError, ReferencingError, ValueError) as error:
            return {"no_schema": str(error).splitlines()[0][:_MOST_SAID]}
        if len(known) > _VALIDATORS:
            known.popitem(last=False)
    elif name not in known:
        return {"unknown": True}
    known.move_to_end(name)
    for place, payload in enumerate(question["payloads"]):
        if (wrong := misfit(known[name], payload)) is not None:
            return {"place": place, "path": wrong[0], "message": wrong[1]}
    return {}


def misfit(validator: Draft202012Validator, payload: Any) -> tuple[str, str] | None:
    """The path of what does not fit, and why; None when all fits."""
    try:
        validator.validate(payload)
    except ValidationError as error:
        path = "".join(f"/{part}" for part in error.instance_path)
        message = error.message
        return path, message if len(message) <= _MOST_SAID else message[:_MOST_SAID] + "…"
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
