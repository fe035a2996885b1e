"""A broker is asked what it can do, and never for its name: the name is for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.broker.postgres import PostgresBroker

ROOT = Path(__file__).parents[2]


def comparisons(tree: ast.AST) -> Iterator[str]:
    """The comparisons with the name of a broker."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            text = ast.unparse(node)
            if "broker.name" in text:
                yield text


def test_no_code_compares_the_name_of_a_broker() -> None:
    paths = [path for folder in ("leasehold", "api", "worker") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 400
    found = {str(path): text for path in paths for text in comparisons(ast.parse(path.read_text()))}
    assert found == {}


def test_a_broker_says_whether_hints_arrive_one_by_one() -> None:
    assert (AmqpBroker.delivers_hints, PostgresBroker.delivers_hints) == (True, False)
