"""One idea, one word: the words that are gone do not come back, in names, comments, messages or pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.gone_words import GONE, STILL
from tests.packaging.test_docs import ROOT, texts

#: A word alone, or a part of a name in snake_case, kebab-case or CamelCase.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
TERM = {word: (words, now) for words, now in GONE.items() for word in words.split()}
HERE = {"tests/packaging/gone_words.py", "tests/packaging/test_words.py"}


def files() -> Iterator[tuple[str, str]]:
    """Path and text, the file's own name included: names of modules are names, too."""
    folders = [*texts(), *(ROOT / "migrations").rglob("*.py"), *(ROOT / "grafana").rglob("*.json")]
    for path in folders:
        name = str(path.relative_to(ROOT))
        if name not in HERE:
            yield name, f"{name}\n{path.read_text()}"


def words_of(text: str) -> set[str]:
    return {word.lower() for word in WORD.findall(text)}


def allowed(word: str, name: str) -> bool:
    return any(name == left or (left.endswith("/") and name.startswith(left)) for left in STILL.get(TERM[word][0], ()))


def test_no_word_that_is_gone_comes_back() -> None:
    back = [
        f"{name}:{number}: '{word}' is gone; write {TERM[word][1]}"
        for name, text in files()
        for word in words_of(text) & TERM.keys()
        if not allowed(word, name)
        for number, line in enumerate(text.splitlines())
        if word in words_of(line)
    ]
    assert back == [], "\n".join(back)


def test_a_word_is_found_in_every_form_of_a_name() -> None:
    for text in (
        "crew",
        "_isolated_crew",
        "CrewOf",
        "leasehold_crew_size",
        "the Crew, then",
        "isolated-crew",
        "CREW_SIZE",
    ):
        assert "crew" in words_of(text), text
    assert words_of("screwed planes outdoors parkour") & TERM.keys() == set()


def test_where_an_old_word_may_still_stand_exists() -> None:
    assert STILL.keys() <= GONE.keys()
    assert [place for places in STILL.values() for place in places if not (ROOT / place).exists()] == []


def test_the_glossary_has_the_terms_that_took_their_places() -> None:
    glossary = (ROOT / "docs/explanation/glossary.md").read_text().lower()
    for now in GONE.values():
        term = re.split(r"[,;]", now)[0]
        assert f"{term}" in glossary, term


def test_the_glossary_names_files_that_exist() -> None:
    glossary = (ROOT / "docs/explanation/glossary.md").read_text()
    named = re.findall(r"`((?:api|bench|chaos|leasehold|tests|worker)/[\w/]*(?:\.py)?)`", glossary)
    assert len(named) > 30
    assert [name for name in named if not (Path(ROOT) / name).exists()] == []
