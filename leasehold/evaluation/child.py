"""The program of the evaluator's child process, which checks payloads against JSON Schemas. It reads questions (a
schema and payloads) from stdin, and writes answers to stdout.

Each question starts a timer of CPU seconds. When the timer ends, the kernel sends SIGPROF. The default action of
SIGPROF kills the process, even while the process runs code of a library. The timer counts CPU seconds and not elapsed
time, because a busy machine must not lead to a refusal. The parent also limits the elapsed time, for a child that is
stopped or gets no CPU time.
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

from leasehold.domain.json_pointer import pointer_to
from leasehold.evaluation.cost import InPlaceCycle, expanded_size
from leasehold.evaluation.flat import compile_schema

#: The head of a question: the size of its body in bytes, and the CPU seconds for the answer.
QUESTION = struct.Struct(">Id")
#: The head of an answer: the size of its body in bytes.
ANSWER = struct.Struct(">I")
#: The environment variables that Python and its libraries need. The child gets no other variables, because they may be
#: secrets.
ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")

#: The child caches at most this many compiled schemas.
_MAX_VALIDATORS = 64
#: The highest depth of Python's recursion. `expanded_size` follows chains of references by recursion. This depth is
#: safe, because pure Python code uses no C stack.
_RECURSION_LIMIT = 100_000
#: The most characters of a message about a payload or a schema.
_MAX_MESSAGE = 300


def main(memory_bytes: int) -> None:
    """Answer questions until stdin ends."""
    _confine(memory_bytes)
    sys.setrecursionlimit(_RECURSION_LIMIT)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    validators: OrderedDict[str, Draft202012Validator] = OrderedDict()
    while (header := questions.read(QUESTION.size)) and len(header) == QUESTION.size:
        size, cpu_seconds = QUESTION.unpack(header)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = orjson.dumps(_answer_next(validators, questions, size))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(ANSWER.pack(len(answer)) + answer)
        answers.flush()


def _confine(memory_bytes: int) -> None:
    """Close all files except the pipes, set the limits of memory and files, and let SIGPROF kill the process."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the parent may leave other files open
    for kind, bound in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(kind, (bound, bound))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    # A terminal sends SIGINT to the parent and to its children. The child ignores the signal, because the parent ends
    # its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer_next(validators: OrderedDict[str, Draft202012Validator], questions: BinaryIO, size: int) -> dict[str, Any]:
    """Read the next question, whose body has `size` bytes, and return the answer. `validators`: the compiled schemas by
    name.

    A question names its schema by a digest (`name`), and has `payloads`. It contains the `schema` itself in two cases:
    if the previous answer was `unknown`, or if the question has `at_most`, the highest cost that the schema may have.

    The members of the answer:
    - no member at all: the schema is valid, and all payloads fit
    - `place`, `path`, `message`: the index of the first payload that does not fit, the JSON Pointer to the value in it
      that does not fit, and the reason
    - `cost`, `cycle` or `no_schema`: the schema is refused
    - `unknown`: this child has no schema of this name, so the parent must ask again with the schema
    """
    question = orjson.loads(questions.read(size))
    name = question["name"]
    if "schema" in question:
        try:
            if "at_most" in question and (cost := expanded_size(question["schema"])) > question["at_most"]:
                return {"cost": cost}
            validators[name] = compile_schema(question["schema"])
        except InPlaceCycle:  # references that lead back to themselves at the same place of the payload
            return {"cycle": True}
        except (ValidationError, ReferencingError, ValueError) as error:
            return {"no_schema": str(error).splitlines()[0][:_MAX_MESSAGE]}
        if len(validators) > _MAX_VALIDATORS:
            validators.popitem(last=False)
    elif name not in validators:
        return {"unknown": True}
    validators.move_to_end(name)
    for place, payload in enumerate(question["payloads"]):
        if (problem := first_mismatch(validators[name], payload)) is not None:
            return {"place": place, "path": problem[0], "message": problem[1]}
    return {}


def first_mismatch(validator: Draft202012Validator, payload: Any) -> tuple[str, str] | None:
    """The JSON Pointer to the first value that does not fit the schema, and the reason. None: the payload fits."""
    try:
        validator.validate(payload)
    except ValidationError as error:
        message = error.message
        is_long = len(message) > _MAX_MESSAGE
        return pointer_to(error.instance_path), message[:_MAX_MESSAGE] + "…" if is_long else message
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
