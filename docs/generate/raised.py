"""Finds the errors that have a stable code, in the syntax tree of each module and in the texts of SQL statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leasehold.domain.sentences import full_stop

_ROOT = Path(__file__).parents[2]
#: The class of answers without an exception: `Problem(status, code, detail)`.
_PROBLEM = "Problem"
#: The function by which a child process tells of a failure: `_failed_frame("permanent", code, message)`.
_FRAME = "_failed_frame"
#: The kinds of errors that statements write into rows: of a task, which is tried again, and of a job, which has ended.
WRITTEN_TO_TASK, WRITTEN_TO_JOB = "written to a task", "written to a job"
_IN_STATEMENTS = {
    WRITTEN_TO_TASK: re.compile(r"'([a-z_]+)' AS code, '([^']+)' AS message"),
    WRITTEN_TO_JOB: re.compile(r"'code', '([a-z_]+)',[^()]*?'message', '([^']+)'"),
}


class Raised(NamedTuple):
    """One place that raises an error. `kind`: the name of the class; for a Problem, the name of its status in
    HTTPStatus; for an error in a statement, WRITTEN_TO_TASK or WRITTEN_TO_JOB. `sentence`: the message for a person,
    with `{name}` for a value.
    """

    kind: str
    code: str
    sentence: str
    file: str


@cache
def raised() -> tuple[Raised, ...]:
    """All errors, in the order of the files. A code may occur several times, with different sentences."""
    return tuple(
        error
        for folder in ("api", "leasehold", "worker")
        for path in sorted((_ROOT / folder).rglob("*.py"))
        for error in _errors_of_file(path)
    )


def _errors_of_file(path: Path) -> Iterator[Raised]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from _errors_of_call(node.func.id, node, str(path.relative_to(_ROOT)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for kind, pattern in _IN_STATEMENTS.items():
                for name, sentence in pattern.findall(node.value):
                    yield Raised(kind, name, sentence, str(path.relative_to(_ROOT)))


def _errors_of_call(kind: str, call: ast.Call, file: str) -> Iterator[Raised]:
    texts = [_text(argument) for argument in call.args]
    named = {keyword.arg: _text(keyword.value) for keyword in call.keywords}
    if kind == _PROBLEM and len(call.args) > 1 and isinstance(call.args[0], ast.Attribute):
        kind, texts = call.args[0].attr, texts[1:]
    elif kind == _FRAME:
        kind, texts = texts[0].capitalize(), texts[1:]
    elif kind == "Retryable":
        texts = [named.get("code", "retryable"), *texts]
    if texts and texts[0] and texts[0].replace("_", "").isalpha() and texts[0].islower():
        yield Raised(kind, texts[0], texts[1] if len(texts) > 1 else "", file)


def _text(node: ast.expr) -> str:
    """The text of a string or an f-string, with `{name}` for its values; "" for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + _name(node.value) + "}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == full_stop.__name__:
        text = _text(node.args[0])
        return text and full_stop(text)
    return ""


def _name(node: ast.expr) -> str:
    """A name for the value of an expression: the name of the variable or attribute. For a call, the name of its last
    argument.
    """
    if isinstance(node, ast.Attribute):
        return "type" if node.attr == "__name__" else node.attr.strip("_").lower()
    if isinstance(node, ast.Name):
        return node.id.strip("_").lower()
    if isinstance(node, ast.Call) and node.args:
        return _name(node.args[-1])
    inner = next((child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.Name, ast.Attribute))), None)
    return _name(inner) if inner is not None else "value"
