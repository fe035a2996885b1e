"""One idea, one word: the words that are gone do not come back, in names, comments, messages or pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.gone_words import GONE, GONE_NAMES, NAMES_STILL, STILL
from tests.packaging.test_docs import ROOT, texts

#: A word alone, or a part of a name in snake_case, kebab-case or CamelCase.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
TERM = {word: (words, now) for words, now in GONE.items() for word in words.split()}
NAME = {word: (words, now) for words, now in GONE_NAMES.items() for word in words.split()}
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


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """The names that the module itself gives: variables, parameters, attributes, functions and classes, with lines."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name


def test_no_name_that_is_gone_comes_back() -> None:
    back = [
        f"{path.relative_to(ROOT)}:{line}: {name!r}: '{word}' is gone; write {NAME[word][1]}"
        for folder in ("leasehold", "api", "worker")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in names_of(path.read_text())
        for word in words_of(name) & NAME.keys()
        if name not in NAMES_STILL.get(NAME[word][0], {}).get(str(path.relative_to(ROOT)), ())
    ]
    assert back == [], "\n".join(back)


def test_a_name_is_found_wherever_it_is_given() -> None:
    source = "class Told: pass\ndef _gate(said):\n    self.took = 1\n    for look in []: pass\n    f(asked=1)\n"
    assert [name for _, name in sorted(names_of(source))] == ["Told", "_gate", "said", "took", "look"]


def test_where_an_old_word_may_still_stand_exists() -> None:
    assert STILL.keys() <= GONE.keys()
    assert [place for places in STILL.values() for place in places if not (ROOT / place).exists()] == []
    assert NAMES_STILL.keys() <= GONE_NAMES.keys()


def test_an_exception_goes_with_its_word() -> None:
    texts_by_name = dict(files())
    idle = [
        (words, place)
        for words, places in STILL.items()
        for place in places
        if not any(
            words_of(text) & set(words.split())
            for name, text in texts_by_name.items()
            if name == place or (place.endswith("/") and name.startswith(place))
        )
    ]
    idle += [
        (words, f"{place}: {name}")
        for words, by_file in NAMES_STILL.items()
        for place, names in by_file.items()
        for name in names
        if name not in {found for _, found in names_of((ROOT / place).read_text())}
    ]
    assert idle == [], "these exceptions are not needed any more: delete them"


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
