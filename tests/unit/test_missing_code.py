"""The handlers that a task needs, as one text."""

from __future__ import annotations

from leasehold.domain.missing_code import joined_handlers, split_handlers


def test_several_handlers_are_one_text_whatever_their_order_and_their_number() -> None:
    text = joined_handlers(["a.b", "c.d.run", "a.b"])
    assert text == joined_handlers(iter(["c.d.run", "a.b"])) == "a.b, c.d.run"
    assert split_handlers(text) == ["a.b", "c.d.run"]
    assert split_handlers("a.b") == ["a.b"]


def test_a_text_that_an_index_could_not_hold_is_none() -> None:
    assert joined_handlers([]) is None
    assert joined_handlers(["x"]) == "x"
    assert joined_handlers(["x" * 2000]) == "x" * 2000
    assert joined_handlers(["x" * 1000, "y" * 999]) is None
