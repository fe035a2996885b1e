"""The page of settings: every setting, in the groups of leasehold/settings.py."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from docs.generate.tables import code, table
from leasehold.cli.variables import default_of
from leasehold.settings import Settings

_INTRODUCTION = """# Settings

Each process reads its settings once, when it starts, from environment variables or from a file `.env` in the current
folder. Times are seconds and sizes are bytes, unless the name says otherwise. A process that meets a value that is not
allowed ends with a sentence that names the variable. Where a text may be unset, an empty one means unset.

A secret may lie in a file: `LEASEHOLD_DATABASE_URL_FILE=/run/secrets/url` in place of `LEASEHOLD_DATABASE_URL`, and so
for each setting of the type secret, and `GENERATION_CREDENTIALS`.
[Secrets in files](../operations/index.md#secrets-in-files) are read again when they change.

`leasehold settings` prints the same list. Default values of secrets are for a machine of your own:
[`scripts/secrets`](../operations/index.md) makes real ones.
"""
_GROUP = re.compile(r"^    # --- (.+)$|^    (\w+): ", re.MULTILINE)
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    parts = [_INTRODUCTION]
    for heading, names in _groups().items():
        rows = [_row(name, Settings.model_fields[name]) for name in names]
        parts += [f"## {heading}", table(["variable", "type", "default", "meaning"], rows)]
    return "\n\n".join(parts)


def _groups() -> dict[str, list[str]]:
    """Heading -> fields. The headings are the comments `# --- ...` of the class."""
    groups: dict[str, list[str]] = {}
    heading = "Others"
    for comment, name in _GROUP.findall(inspect.getsource(Settings)):
        if comment:
            heading = comment[0].upper() + comment[1:]
        elif name in Settings.model_fields:
            groups.setdefault(heading, []).append(name)
    return groups


def _row(name: str, field: FieldInfo) -> tuple[str, str, str, str]:
    return code(f"LEASEHOLD_{name.upper()}"), _type_of(field), _default_of(field), field.description or ""


def _type_of(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, attribute):,}"
        for bound in field.metadata
        for attribute, sign in _BOUNDS.items()
        if getattr(bound, attribute, None) is not None
    ]
    return ", ".join([_name_of(field.annotation), *bounds])


def _name_of(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(code(str(choice)) for choice in get_args(kind))
    arguments = [argument for argument in get_args(kind) if argument is not type(None)]
    if get_origin(kind) in (dict, list, tuple, frozenset, set):
        return "JSON"
    if arguments:
        return " or ".join(_name_of(argument) for argument in arguments)
    return {SecretStr: "secret", str: "text", bool: "true or false", int: "integer", float: "number"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def _default_of(field: FieldInfo) -> str:
    default = default_of(field)
    return code(default) if default else ""
