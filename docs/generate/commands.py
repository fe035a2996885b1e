"""The page of the command line: every command with its arguments and options, as leasehold/cli declares them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from docs.generate.tables import code, table
from leasehold.cli.main import app

_INTRODUCTION = """# The command line

`leasehold COMMAND --help` prints the same. Commands that speak to an API read its address from `LEASEHOLD_URL` and the
key from `LEASEHOLD_API_KEY`; the others read the [settings](settings.md). With `--json`
stdout has JSON and nothing else.

| exit status | means |
|---|---|
| 0 | done |
| 1 | it failed or was refused; a run that was watched has not succeeded; `doctor` found something wrong |
| 2 | the command was used wrongly: an argument, a setting, a missing key |
| 3 | a server does not answer, or cannot answer now (the API says 429, 502, 503 or 504): try again |
| 4 | a module of yours raised an error when it was imported: the traceback above the sentence has your frames alone |
| 130 | interrupted by Ctrl-C |

A command that ends with 3 may have done its work: only the answer may be lost. Commands with `--idempotency-key` do
nothing twice with the same key, so a script gives them a key of its own. Without it each command makes a new key, and
the error names this key if the request may be done. Before you run another command again that makes or retries
something, such as `retry`, `dead-letters replay` or `keys create`, look whether it was done.
"""


def page() -> str:
    return "\n\n".join([_INTRODUCTION, *_commands("leasehold", typer.main.get_command(app))])


def _commands(path: str, command: Any) -> Iterator[str]:
    """The sections of the command and of the commands below it. `command`: an object of Typer's copy of click, which
    has no types.
    """
    children = getattr(command, "commands", None)
    if children is not None:
        for name, child in sorted(children.items()):
            yield from _commands(f"{path} {name}", child)
        return
    usage = [path, *(_usage_of(parameter) for parameter in command.params if _is_argument(parameter))]
    rows = [(_name_of(parameter), _default_of(parameter), _help_of(parameter)) for parameter in command.params]
    yield f"## {path}"
    yield code(" ".join(usage))
    yield " ".join((command.help or "").split())
    if rows:
        yield table(["", "default", "meaning"], rows)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _usage_of(parameter: Any) -> str:
    name = str(parameter.name).upper()
    many = "..." if parameter.nargs != 1 else ""
    return f"{name}{many}" if parameter.required else f"[{name}{many}]"


def _name_of(parameter: Any) -> str:
    if _is_argument(parameter):
        return code(str(parameter.name).upper())
    return code(", ".join(parameter.opts))


def _help_of(parameter: Any) -> str:
    return parameter.help or ""


def _default_of(parameter: Any) -> str:
    if parameter.default in (None, False, ()) or callable(parameter.default):
        return "required" if parameter.required else ""
    return code(str(parameter.default))
