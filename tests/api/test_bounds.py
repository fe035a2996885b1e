"""The bounds of the published contract (docs/reference/openapi.json): a value at a bound is taken, the next one is not.

The document in the repository is asked, not the one that the API makes: a bound that moves in the code fails here.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from leasehold.domain.ids import new_id
from tests.api.conftest import MakeKey, Running, client_of
from tests.security.test_scopes import SCOPES

DOCUMENT = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "openapi.json").read_text())
AT_ONCE = 8


@dataclass(frozen=True)
class Probe:
    """One request with one value. `place`: where the answer says that the value is wrong."""

    method: str
    path: str
    place: str
    value: Any
    is_taken: bool
    query: dict[str, Any] | None = None
    body: Any = None


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references. Of a type or null, the type."""
    if "$ref" in schema:
        return resolved(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    others = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    return resolved(others[0]) if len(others) == 1 else schema


def values(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at the bounds of the schema, and next to them: each with whether it is taken."""
    for name, beyond in (("minimum", -1), ("maximum", 1)):
        if name in schema:
            yield from ((schema[name], True), (schema[name] + beyond, False))
    if "exclusiveMinimum" in schema:
        yield from ((schema["exclusiveMinimum"], False), (schema["exclusiveMinimum"] + 1, True))
    if schema.get("type") == "string" and "format" not in schema:
        for length, is_taken in lengths(schema, "Length"):
            text = "a" * length
            if not is_taken or re.search(schema.get("pattern", ""), text):
                yield text, is_taken
        yield from ((text, True) for text in schema.get("enum", ()))
        if "enum" in schema:
            yield "neither", False
    if schema.get("type") == "array" and (item := example(schema["items"])) is not None:
        yield from (([item] * length, is_taken) for length, is_taken in lengths(schema, "Items"))


def lengths(schema: dict[str, Any], of: str) -> Iterator[tuple[int, bool]]:
    if least := schema.get(f"min{of}"):
        yield from ((least, True), (least - 1, False))
    if f"max{of}" in schema:
        yield from ((schema[f"max{of}"], True), (schema[f"max{of}"] + 1, False))


def example(schema: dict[str, Any]) -> Any:
    """A short text that the schema takes; None: it takes no such text."""
    schema = resolved(schema)
    is_text = schema.get("type") == "string" and not {"format", "enum"} & schema.keys()
    return "ab" if is_text and re.search(schema.get("pattern", ""), "ab") else None


def places(
    schema: dict[str, Any], pointer: str, wrap: Callable[[Any], Any]
) -> Iterator[tuple[str, dict[str, Any], Callable[[Any], Any]]]:
    """Every place in a body: its pointer, its schema, and what makes a body of its value."""
    schema = resolved(schema)
    yield pointer, schema, wrap
    for name, inner in schema.get("properties", {}).items():
        yield from places(inner, f"{pointer}/{name}", partial(_within, wrap, name))
    if schema.get("type") == "array":
        yield from places(schema["items"], f"{pointer}/0", lambda value: wrap([value]))


def _within(wrap: Callable[[Any], Any], name: str, value: Any) -> Any:
    return wrap({name: value})


def probes() -> dict[str, list[Probe]]:
    """All probes, by the first parts of the path."""
    found: defaultdict[str, list[Probe]] = defaultdict(list)
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            # A key is named by its prefix, and everything else by an id.
            ids = {"{prefix}": "a" * 12, **{part: str(new_id()) for part in path.split("/") if part.endswith("id}")}}
            at = "/".join(ids.get(part, part.strip("{}")) for part in path.split("/"))
            group = found["/".join(path.split("/")[:3])]
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    name = parameter["name"]
                    for value, is_taken in values(resolved(parameter["schema"])):
                        group.append(Probe(method, at, name, value, is_taken, {name: value}))
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                for pointer, schema, wrap in places(content["application/json"]["schema"], "#", lambda value: value):
                    for value, is_taken in values(schema):
                        group.append(Probe(method, at, pointer, value, is_taken, None, wrap(value)))
    return {group: asked for group, asked in found.items() if asked}


PROBES = probes()


def test_the_contract_has_hundreds_of_bounds() -> None:
    assert sum(len(asked) for asked in PROBES.values()) > 500


async def test_the_api_serves_the_published_contract(api: Running) -> None:
    """Also what no request shows: the value of what a request leaves out, and the status of each success."""
    async with client_of(api.url) as client:
        assert (await client.get("/openapi.json")).json() == DOCUMENT


@pytest.mark.parametrize("group", sorted(PROBES))
async def test_a_value_at_a_published_bound_is_taken_and_the_next_one_is_refused(
    api: Running, make_key: MakeKey, group: str
) -> None:
    key, room = await make_key(scopes=tuple(SCOPES)), asyncio.Semaphore(AT_ONCE)

    async def is_right(client: httpx2.AsyncClient, probe: Probe) -> bool:
        async with room:
            answer = await client.request(probe.method, probe.path, params=probe.query, json=probe.body)
        assert answer.status_code != 500, (probe, answer.text)  # 503: this installation lacks a setting
        errors = answer.json().get("errors", ()) if answer.status_code == 422 else ()
        refused = any(probe.place in (error.get("pointer"), error.get("parameter")) for error in errors)
        return refused != probe.is_taken

    async with client_of(api.url, key.text) as client:
        right = await asyncio.gather(*(is_right(client, probe) for probe in PROBES[group]))
    assert [probe for probe, one in zip(PROBES[group], right, strict=True) if not one] == []
