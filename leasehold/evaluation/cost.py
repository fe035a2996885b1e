"""Computes the cost of a JSON Schema: how many nodes an evaluation would visit, called the expanded size.

A node is a subschema, a keyword, a value in `enum`, `const` or `required`, or a character of a pattern. A `$ref` counts
as much as its target. For example, 27 definitions count 2^27 if each of them refers twice to the next definition.
Recursion into parts of the payload (such as a tree's children) counts once, because the payload's own size and the
evaluator's time limit bound the recursion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from leasehold.domain.json_pointer import value_at

#: Keywords that apply subschemas to the same value. The keyword's value is a single subschema, a list of subschemas, or
#: a mapping of names to subschemas.
_SAME_SINGLE = ("not", "if", "then", "else")
_SAME_LIST = ("allOf", "anyOf", "oneOf")
_SAME_MAP = ("dependentSchemas",)
#: Keywords that apply subschemas to a part of the value.
_PART_SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
)
_PART_LIST = ("prefixItems",)
_PART_MAP = ("properties", "patternProperties")
_REFS = ("$ref", "$dynamicRef")
#: A schema with one of these keywords evaluates its subschemas for the same value twice, to learn which parts of the
#: value they have evaluated.
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")

#: The cost of a reference that leads out of the document, for example to a metaschema. Its target is not counted.
_OUTSIDE_COST = 1000
#: A counted repetition in a pattern, such as `{2,5}`.
_REPETITION = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
#: A higher cost counts as this cost, because sums of sums could otherwise become numbers of a million digits.
_MAX_COST = 10**9


class InPlaceCycle(Exception):
    """The schema refers to itself for the same value, so its evaluation would never end."""


@dataclass(eq=False, slots=True)
class _Node:
    """A subschema. (Its keywords are no nodes of this kind, but count in `own_cost`.) `own_cost`: the cost of the
    subschema itself and of its keywords. `same`: the subschemas that apply to the same value. `parts`: the subschemas
    that apply to parts of the value. `is_doubled`: `same` counts twice. `group`: the number of the node's strongly
    connected component (nodes that reach each other); -1: not known yet.
    """

    own_cost: int
    is_doubled: bool = False
    same: list[_Node] = field(default_factory=list)
    parts: list[_Node] = field(default_factory=list)
    group: int = -1


def expanded_size(schema: Any) -> int:
    """How many nodes an evaluation would visit, at most 10^9. Raises InPlaceCycle.

    Follows chains of references by recursion, so the interpreter's recursion limit must be high.
    """
    root = _Document(schema).node(schema)
    return _Costs(_recursions(root)).of(root)


class _Document:
    """Makes one node for each subschema of a document. Resolves references by pointer, anchor or `$id`."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._nodes: dict[int, _Node] = {}  # by the id() of the subschema
        self._by_uri: dict[str, Any] = {"": schema}  # by URI: the document, and the subschemas with an `$id`
        self._anchors: dict[tuple[str, str], Any] = {}  # by base URI and name
        self._dynamic_anchors: dict[str, list[Any]] = {}  # by name
        self._base_of: dict[int, str] = {}  # by the id() of the subschema
        self._index(schema, "")

    def _index(self, value: Any, base: str) -> None:
        """Record the names (URIs and anchors) of all subschemas within `value`. `base`: the URI of the schema around
        `value`, against which an `$id` is resolved.
        """
        if isinstance(value, dict):
            if isinstance(own_id := value.get("$id"), str) and (own_uri := urldefrag(own_id)[0]):
                base = urljoin(base, own_uri)
                self._by_uri[base] = value
            self._base_of[id(value)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := value.get(keyword), str):
                    self._anchors[base, name] = value
            if isinstance(name := value.get("$dynamicAnchor"), str):
                self._dynamic_anchors.setdefault(name, []).append(value)
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for child in children:
            self._index(child, base)

    def node(self, schema: Any) -> _Node:
        """The node of the subschema. The same subschema always has the same node."""
        if not isinstance(schema, dict):
            return _Node(1)
        node = self._nodes.get(id(schema))
        if node is not None:
            return node
        node = self._nodes[id(schema)] = _Node(
            1 + _keywords_cost(schema), is_doubled=any(keyword in schema for keyword in _UNEVALUATED)
        )
        node.same += [self.node(subschema) for subschema in _subschemas(schema, _SAME_SINGLE, _SAME_LIST, _SAME_MAP)]
        node.parts += [self.node(subschema) for subschema in _subschemas(schema, _PART_SINGLE, _PART_LIST, _PART_MAP)]
        for keyword in _REFS:
            if isinstance(reference := schema.get(keyword), str):
                for target in self._targets(schema, reference, dynamic=keyword == "$dynamicRef"):
                    node.same.append(_Node(_OUTSIDE_COST) if target is None else self.node(target))
        return node

    def _targets(self, schema: dict[str, Any], reference: str, *, dynamic: bool) -> list[Any]:
        """The possible targets of the reference; None stands for a target outside this document."""
        uri, fragment = urldefrag(reference)
        fragment = unquote(fragment)
        if dynamic and (targets := self._dynamic_anchors.get(fragment)):
            return list(targets)  # only an evaluation shows which of them applies, so all of them count
        base = urljoin(self._base_of.get(id(schema), ""), uri)
        if fragment and not fragment.startswith("/"):
            return [self._anchors.get((base, fragment))]
        return [value_at(self._by_uri.get(base), fragment)]


def _subschemas(
    schema: Mapping[str, Any], single: tuple[str, ...], lists: tuple[str, ...], maps: tuple[str, ...]
) -> Iterator[Any]:
    """The subschemas below these keywords, whose values are a single subschema, a list, or a mapping by name."""
    for keyword in single:
        if keyword in schema:
            yield schema[keyword]
    for keyword in lists:
        if isinstance(subschemas := schema.get(keyword), list):
            yield from subschemas
    for keyword in maps:
        if isinstance(by_name := schema.get(keyword), dict):
            yield from by_name.values()


def _keywords_cost(schema: Mapping[str, Any]) -> int:
    """The cost of a subschema's own keywords."""
    size = len(schema) + sum(
        value_count(schema[keyword]) for keyword in ("enum", "const", "required") if keyword in schema
    )
    if isinstance(required_by_name := schema.get("dependentRequired"), dict):
        size += value_count(required_by_name)
    if isinstance(pattern := schema.get("pattern"), str):
        size += _pattern_cost(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        size += sum(map(_pattern_cost, patterns))
    return size


def value_count(value: Any) -> int:
    """How many values a JSON value contains. The value itself counts, too."""
    if isinstance(value, dict):
        return 1 + sum(map(value_count, value.values()))
    return 1 + sum(map(value_count, value)) if isinstance(value, list) else 1


def _pattern_cost(pattern: str) -> int:
    """The pattern's length, plus the bound of each counted repetition."""
    size = len(pattern)
    for least_times, most_times in _REPETITION.findall(pattern):
        size = min(_MAX_COST, size + max(int(least_times), int(most_times or 0)))
    return size


def _recursions(root: _Node) -> dict[int, list[_Node]]:
    """Number the groups of all nodes (`_Node.group`). Returns group -> its recursive parts. A node is a recursive part
    if it is among the `parts` of a node of its own group, or among its own `parts`. An example is the schema of a
    tree's children.
    """
    nodes = _number_groups(root)
    recursions: dict[int, list[_Node]] = {}
    for node in nodes:
        for part in node.parts:
            if part.group == node.group and part not in (found := recursions.setdefault(node.group, [])):
                found.append(part)
    return recursions


def _number_groups(root: _Node) -> list[_Node]:
    """Number the strongly connected components: groups of nodes that reach each other (Tarjan's algorithm). Returns all
    nodes.
    """
    order: dict[_Node, int] = {}  # the number of the node's visit
    low: dict[_Node, int] = {}  # the number of the earliest node on the stack that the node reaches
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
        if low[node] == order[node]:  # the group of `node` is complete: `node` and all nodes above it on the stack
            while node.group < 0:
                stack.pop().group = order[node]

    visit(root)
    return list(order)


class _Costs:
    """The costs of nodes. `recursions`: group -> its recursive parts.

    A recursive part counts only 1 at its place in the schema, so that counting ends. Its whole cost is added once for
    each place where a node outside the group leads into the group (`of`). The depth of the recursion does not count,
    because the payload bounds it.
    """

    def __init__(self, recursions: Mapping[int, Sequence[_Node]]) -> None:
        self._recursions = recursions
        self._once: dict[_Node, int] = {}  # the costs by `_cost_once`
        self._of_recursions: dict[int, int] = {}  # group -> the whole cost of its recursive parts
        self._visiting: set[_Node] = set()  # the nodes whose cost is being computed

    def of(self, node: _Node) -> int:
        """The cost of a node, for a reference from outside the node's group. This is the cost by `_cost_once`, plus the
        whole cost of the group's recursive parts. Raises InPlaceCycle.
        """
        if node.group not in self._of_recursions:
            parts = self._recursions.get(node.group, ())
            self._of_recursions[node.group] = min(_MAX_COST, sum(map(self._cost_once, parts)))
        return min(_MAX_COST, self._cost_once(node) + self._of_recursions[node.group])

    def _cost_once(self, node: _Node) -> int:
        """The cost of the node, where each recursive part of its group counts only 1. Raises InPlaceCycle."""
        if node in self._once:
            return self._once[node]
        if node in self._visiting:
            raise InPlaceCycle
        self._visiting.add(node)
        same = sum(self._cost_once(other) if other.group == node.group else self.of(other) for other in node.same)
        parts = sum(1 if other.group == node.group else self.of(other) for other in node.parts)
        self._visiting.discard(node)
        self._once[node] = min(_MAX_COST, node.own_cost + same * (2 if node.is_doubled else 1) + parts)
        return self._once[node]
