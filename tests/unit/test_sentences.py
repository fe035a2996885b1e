"""The parts of sentences: they are right for one, and for what other programs say."""

from __future__ import annotations

import pytest

from leasehold.domain.sentences import counted, full_stop, with_article


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("reset", "reset."),
        ("The server is away.", "The server is away."),
        ("is it a Leasehold API?", "is it a Leasehold API?"),
        ("and so on...", "and so on..."),
        ("reset\n", "reset."),
    ],
)
def test_a_sentence_has_one_mark_at_its_end(text: str, sentence: str) -> None:
    assert full_stop(text) == sentence


@pytest.mark.parametrize(("number", "text"), [(0, "0 jobs"), (1, "1 job"), (2, "2 jobs"), (2000, "2,000 jobs")])
def test_a_number_has_its_noun(number: int, text: str) -> None:
    assert counted(number, "job", "jobs") == text


@pytest.mark.parametrize(
    ("name", "words"), [("str", "a str"), ("int", "an int"), ("AttributeError", "an AttributeError")]
)
def test_the_name_of_a_type_has_its_article(name: str, words: str) -> None:
    assert with_article(name) == words
