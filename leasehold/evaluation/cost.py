"""How much an evaluation of a JSON Schema would visit: its expanded size.

A node is a subschema, or a value in `enum` and `const`, or a character of a pattern. A `$ref` counts as much as what it
refers to, so two references in each of 27 definitions count 2^27. Recursion through the payload (a tree's children)
counts once: there the payload's own size, and the evaluator's time limit, are the bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag

#: Keywords that apply subschemas to the same value: one subschema, a list, a mapping of names.
_SAME_ONE = ("not", "if", "then", "else")
_SAME_LIST = ("allOf", "anyOf", "oneOf")
_SAME_MAP = ("dependentSchemas",)
#: ... and to a part of the value.
_PART_ONE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "propertyNames")
_PART_LIST = ("prefixItems",)
_PART_MAP = ("properties", "patternProperties")
_REFS = ("$ref", "$dynamicRef")
#: Evaluating these asks once more of all subschemas beside them what they have evaluated.
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")

#: What a reference costs that leads out of the document, as to a metaschema: nobody counts what it refers to.
_ELSEWHERE = 1000
_REPEATED = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
#: A count is cut here, so that no sum of sums becomes a number of a million digits.
_MOST = 10**9


class InPlaceCycle(Exception):
    """A schema refers to itself without going deeper into the value: its evaluation would never end."""


@dataclass(eq=False, slots=True)
class _Node:
    own: int
    doubled: bool = False
    same: list[_Node] = field(default_factory=list)
    parts: list[_Node] = field(default_factory=list)
    total: int | None = None
    group: int = -1


def expanded_size(schema: Any) -> int:
    """Count what an evaluation would visit, at most 10^9. Raises InPlaceCycle.

    It goes along chains of references by recursion: the interpreter's limit has to be high.
    """
    root = _Document(schema).node(schema)
    _number_groups(root)
    return _total(root, set())


class _Document:
    """Makes nodes of a document's subschemas, each once. References are found by pointer, anchor or `$id`."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._nodes: dict[int, _Node] = {}
        self._by_uri: dict[str, Any] = {"": schema}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[str, list[Any]] = {}
        self._base_of: dict[int, str] = {}
        self._index(schema, "")

    def _index(self, found: Any, base: str) -> None:
        if isinstance(found, dict):
            if isinstance(name := found.get("$id"), str):
                base = "" if found is self._schema else urldefrag(name)[0]
                self._by_uri[urldefrag(name)[0]] = self._by_uri[base] = found
            self._base_of[id(found)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := found.get(keyword), str):
                    self._anchors[base, name] = found
            if isinstance(name := found.get("$dynamicAnchor"), str):
                self._dynamic.setdefault(name, []).append(found)
        values = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        for value in values:
            self._index(value, base)

    def node(self, schema: Any) -> _Node:
        if not isinstance(schema, dict):
            return _Node(1)
        known = self._nodes.get(id(schema))
        if known is not None:
            return known
        node = self._nodes[id(schema)] = _Node(
            1 + _own(schema), doubled=any(keyword in schema for keyword in _UNEVALUATED)
        )
        node.same += [self.node(one) for one in _under(schema, _SAME_ONE, _SAME_LIST, _SAME_MAP)]
        node.parts += [self.node(one) for one in _under(schema, _PART_ONE, _PART_LIST, _PART_MAP)]
        for keyword in _REFS:
            if isinstance(reference := schema.get(keyword), str):
                for target in self._targets(schema, reference, dynamic=keyword == "$dynamicRef"):
                    node.same.append(_Node(_ELSEWHERE) if target is None else self.node(target))
        return node

    def _targets(self, schema: dict[str, Any], reference: str, *, dynamic: bool) -> list[Any]:
        """What the reference may mean; None for what is not in this document."""
        uri, fragment = urldefrag(reference)
        fragment = unquote(fragment)
        if dynamic and (found := self._dynamic.get(fragment)):
            return list(found)
        base = uri or self._base_of.get(id(schema), "")
        if fragment and not fragment.startswith("/"):
            return [self._anchors.get((base, fragment))]
        return [_at(self._by_uri.get(base), fragment)]


def _at(found: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _under(
    schema: Mapping[str, Any], single: tuple[str, ...], lists: tuple[str, ...], maps: tuple[str, ...]
) -> Iterator[Any]:
    for keyword in single:
        if keyword in schema:
            yield schema[keyword]
    for keyword in lists:
        if isinstance(found := schema.get(keyword), list):
            yield from found
    for keyword in maps:
        if isinstance(found := schema.get(keyword), dict):
            yield from found.values()


def _own(schema: Mapping[str, Any]) -> int:
    """What the keywords of one subschema cost themselves."""
    size = len(schema) + sum(_values(schema[keyword]) for keyword in ("enum", "const", "required") if keyword in schema)
    if isinstance(needed := schema.get("dependentRequired"), dict):
        size += _values(needed)
    if isinstance(pattern := schema.get("pattern"), str):
        size += _of_pattern(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        size += sum(map(_of_pattern, patterns))
    return size


def _values(found: Any) -> int:
    if isinstance(found, dict):
        return 1 + sum(map(_values, found.values()))
    return 1 + sum(map(_values, found)) if isinstance(found, list) else 1


def _of_pattern(pattern: str) -> int:
    """Its length, with every counted repetition taken as if it stood around all of it; far more than it costs."""
    size = len(pattern)
    for least, most in _REPEATED.findall(pattern):
        size = min(_MOST, size + max(int(least), int(most or 0)))
    return size


def _number_groups(root: _Node) -> None:
    """Give every node the number of its strongly connected component (Tarjan): nodes that reach each other."""
    order: dict[_Node, int] = {}
    low: dict[_Node, int] = {}
    stack: list[_Node] = []

    def visit(node: _Node) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in (*node.same, *node.parts):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other.group < 0:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            while node.group < 0:
                stack.pop().group = order[node]

    visit(root)


def _total(node: _Node, under_way: set[_Node]) -> int:
    if node.total is not None:
        return node.total
    if node in under_way:
        raise InPlaceCycle
    under_way.add(node)
    same = sum(_total(other, under_way) for other in node.same)
    if node.doubled:
        same *= 2
    # a part that leads back is evaluated once for each level of the payload, not of the schema
    parts = sum(1 if other.group == node.group else _total(other, under_way) for other in node.parts)
    under_way.discard(node)
    node.total = min(_MOST, node.own + same + parts)
    return node.total
