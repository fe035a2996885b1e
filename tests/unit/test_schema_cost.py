"""The cost of a payload's schema bounds its evaluation, whatever way the schema refers to itself."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold.evaluation.cost import InPlaceCycle, expanded_size

CHAIN = 20


def doubling(name: str = "d") -> dict[str, Any]:
    """Definitions of which each refers twice to the next one."""
    twice = [{"allOf": [{"$ref": f"#/$defs/{name}{n + 1}"}] * 2} for n in range(CHAIN)]
    return {f"{name}{n}": schema for n, schema in enumerate([*twice, {"type": "string"}])}


SELF = {"$ref": "#/$defs/c"}


@pytest.mark.parametrize(
    "beside",
    [[], [{"$ref": "#"}], [{"properties": {"y": {"$ref": "#/properties/x"}}}]],
    ids=["alone", "beside a recursion", "in a recursion"],
)
def test_definitions_that_double_cost_what_they_are_expanded_to(beside: list[Any]) -> None:
    schema = {"$defs": doubling(), "properties": {"x": {"allOf": [*beside, {"$ref": "#/$defs/d0"}]}}}
    assert expanded_size(schema) > 2**CHAIN


def test_a_tree_costs_its_definition_and_not_its_depth() -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert 5 <= expanded_size(tree) < 30


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"c": SELF}, "$ref": "#/$defs/c"},
        {"$defs": {"c": SELF}, "properties": {"x": {"allOf": [{"$ref": "#"}, SELF]}}},
        {"$id": "http://h/r", "$defs": {"a": {"$anchor": "a", "$ref": "http://h/r#a"}}, "$ref": "#a"},
        {"$id": "http://h/r", "$defs": {"a": {"$id": "a", "$ref": "http://h/a"}}, "$ref": "a"},
        {"$defs": {"a": {"$anchor": "a", "$ref": "#a"}}, "$ref": "#a"},
    ],
)
def test_a_schema_that_refers_to_itself_for_the_same_value_is_refused_however_it_names_itself(schema: Any) -> None:
    with pytest.raises(InPlaceCycle):
        expanded_size(schema)


def test_a_reference_out_of_the_document_has_a_fixed_cost() -> None:
    assert 1000 <= expanded_size({"$ref": "https://json-schema.org/draft/2020-12/schema"}) < 1010
