"""The changes of a piece of SQL. A piece may be a fragment, because the code assembles some statements from fragments.

`sqlglot` finds the tokens and their places. A removed condition stays in the text, as in `(true OR (condition))`. So
its parameters keep their types, and PostgreSQL still prepares the statement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from sqlglot.dialects.postgres import Postgres
from sqlglot.tokenizer_core import TokenType

from mutants.mutant import Change, Edit

#: The words that end a condition at the same depth of brackets. Some of them begin another condition.
_WORDS = (
    "WHERE ON WHEN THEN ELSE SELECT FROM GROUP ORDER LIMIT OFFSET FOR RETURNING UNION INTERSECT EXCEPT HAVING AS SET "
    "JOIN LEFT RIGHT FULL CROSS INNER WINDOW VALUES USING DO INSERT UPDATE DELETE WITH , ;"
)
_BOUNDARIES = frozenset(_WORDS.split())
_MOVED_BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_CLOCKS = ("CLOCK_TIMESTAMP", "STATEMENT_TIMESTAMP", "NOW")
_FILTERS = ("WHERE", "HAVING")


@dataclass(frozen=True, slots=True)
class _Token:
    word: str  # in upper case; of "ORDER BY" only the first word
    start: int
    end: int  # exclusive
    literal: bool  # a text in quotes
    number: bool


@dataclass(slots=True)
class _Level:
    """One depth of brackets, or a CASE, while its tokens are read."""

    opener: str
    context: str = ""  # the boundary before the condition that is being read
    verb: str = ""  # the statement at this depth
    first: int = 0  # the condition's first token
    cuts: list[tuple[int, str]] = field(default_factory=list)  # the ANDs and ORs of the condition, by token
    between: bool = False
    has_operand: bool = False  # of a CASE: its WHENs have values for the operand, not conditions


def changes(text: str) -> list[Change]:
    """Every change of `text`. Raises sqlglot.errors.TokenError if the text is not SQL."""
    tokens = _tokens(text)
    return [*_conditions(text, tokens), *_bounds(text, tokens), *_locks(text, tokens), *_writes(text, tokens)]


def _tokens(text: str) -> list[_Token]:
    return [
        _Token(
            token.text.upper().split()[0] if token.text.split() else "",
            token.start,
            token.end + 1,
            token.token_type is TokenType.STRING,
            token.token_type is TokenType.NUMBER,
        )
        for token in Postgres().tokenize(text)
    ]


def _wrap(text: str, start: int, end: int, before: str) -> tuple[Edit, ...]:
    """The edits that make `(before (condition))` of the condition from `start` to `end`."""
    assert end <= len(text)
    return Edit(start, start, f"({before} ("), Edit(end, end, "))")


def _conditions(  # noqa: C901 - one pass over the tokens: a case for each
    text: str, tokens: list[_Token]
) -> Iterator[Change]:
    """Remove each conjunct, each disjunct and each branch of a CASE. Make each write with a WHERE write nothing."""
    levels = [_Level("")]
    for n, token in enumerate(tokens):
        level = levels[-1]
        if token.literal:
            continue
        if token.word in ("(", "[", "{", "CASE"):
            levels.append(_Level(token.word, first=n + 1))
        elif token.word in (")", "]", "}", "END"):
            yield from _end_condition(text, tokens, level, n)
            if len(levels) > 1:  # otherwise another fragment has opened the bracket
                levels.pop()
            else:
                levels[0] = _Level("", first=n + 1)
        elif token.word == "BETWEEN":
            level.between = True
        elif token.word == "AND" and level.between:
            level.between = False
        elif token.word in ("AND", "OR"):
            level.cuts.append((n, token.word))
        elif _is_boundary(tokens, n):
            yield from _end_condition(text, tokens, level, n)
            level.has_operand |= token.word == "WHEN" and not level.context and n > level.first
            level.context, level.first, level.cuts = token.word, n + 1, []
            if token.word in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                level.verb = token.word
    for level in levels:
        yield from _end_condition(text, tokens, level, len(tokens))


def _is_boundary(tokens: list[_Token], n: int) -> bool:
    token = tokens[n]
    if token.word not in _BOUNDARIES:
        return False
    if token.word == "FROM":  # not a boundary in IS DISTINCT FROM
        return tokens[n - 1].word != "DISTINCT"
    if token.word in ("LEFT", "RIGHT"):  # before a bracket they are functions
        return n + 1 == len(tokens) or tokens[n + 1].word != "("
    return True


def _end_condition(text: str, tokens: list[_Token], level: _Level, end: int) -> Iterator[Change]:
    """The changes of the condition between `level.first` and the token `end`."""
    if end <= level.first:
        return
    whole = (tokens[level.first].start, tokens[end - 1].end)
    disjuncts = _split(level.first, end, [n for n, word in level.cuts if word == "OR"])
    for first, after in disjuncts:
        if len(disjuncts) > 1:
            yield _condition(text, tokens, first, after, "disjunct dropped", "false AND")
        conjuncts = _split(first, after, [n for n, word in level.cuts if word == "AND" and first <= n < after])
        if len(conjuncts) > 1 or (len(disjuncts) == 1 and level.context in _FILTERS):
            for start, stop in conjuncts:
                yield _condition(text, tokens, start, stop, "conjunct dropped", "true OR")
    if level.context == "WHEN" and level.opener == "CASE":
        never = (Edit(*whole, "NULL"),) if level.has_operand else _wrap(text, *whole, "false AND")
        yield Change("branch never taken", text[slice(*whole)], never)
    if level.context == "WHERE" and level.verb in ("UPDATE", "DELETE"):
        yield Change(f"{level.verb} left out", text[slice(*whole)], _wrap(text, *whole, "false AND"))


def _split(first: int, end: int, cuts: list[int]) -> list[tuple[int, int]]:
    return [(a + 1, b) for a, b in pairwise([first - 1, *cuts, end]) if b > a + 1]


def _condition(text: str, tokens: list[_Token], first: int, end: int, kind: str, before: str) -> Change:
    place = tokens[first].start, tokens[end - 1].end
    return Change(kind, text[slice(*place)], _wrap(text, *place, before))


def _bounds(text: str, tokens: list[_Token]) -> Iterator[Change]:
    """Include or exclude the equality of each bound, add one to each constant, double each interval, and drop an
    element of each list of literals.
    """
    for n, token in enumerate(tokens):
        before = tokens[n - 1].word if n else ""
        near = " ".join(one.word for one in tokens[max(n - 5, 0) : n + 6])  # not the text: it may have comments
        if token.word in _MOVED_BOUNDS and not token.literal and not _is_of_clock(tokens, n):
            yield Change("bound moved", near, (Edit(token.start, token.end, _MOVED_BOUNDS[token.word]),))
        elif token.number and token.word.isdigit() and not _is_unguarding(token, before):
            yield Change("constant moved", near, (Edit(token.start, token.end, str(int(token.word) + 1)),))
        elif token.literal and before == "INTERVAL":
            number, _, unit = text[token.start : token.end].strip("'").partition(" ")
            if number.isdigit():
                longer = f"'{int(number) * 2 or 1} {unit}'"
                yield Change("interval doubled", near, (Edit(token.start, token.end, longer),))
        elif token.word == "(" and before == "IN":
            yield from _lists(text, tokens, n)


def _is_of_clock(tokens: list[_Token], n: int) -> bool:
    """Whether the token compares with the present instant: it equals no other one, to the microsecond."""
    before_and_after = [token.word for token in (*tokens[max(n - 3, 0) : n], *tokens[n + 1 : n + 2])]
    return any(word in _CLOCKS for word in before_and_after)


def _is_unguarding(token: _Token, before: str) -> bool:
    """Whether the number guards nothing: it names a parameter or a column to sort by, stands in `SELECT 1`, or is the
    size of a batch.
    """
    return before in ("$", "SELECT", "ORDER") or (before == "LIMIT" and int(token.word) > 1)


def _lists(text: str, tokens: list[_Token], opened: int) -> Iterator[Change]:
    """Drop each element of `IN ('a', 'b')`."""
    end = opened + 1
    while end < len(tokens) and (tokens[end].literal or tokens[end].word == ","):
        end += 1
    literals = [n for n in range(opened + 1, end) if tokens[n].literal]
    if len(literals) > 1 and end < len(tokens) and tokens[end].word == ")":
        for n in literals:
            other = next(m for m in literals if m != n)
            place = tokens[n].start, tokens[n].end
            twin = text[tokens[other].start : tokens[other].end]  # the list has another element twice, which is valid
            yield Change("element dropped", f"{text[slice(*place)]} of {_line(text, place[0])}", (Edit(*place, twin),))


def _line(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0]


def _locks(text: str, tokens: list[_Token]) -> Iterator[Change]:
    """Remove each FOR UPDATE, SKIP LOCKED and ON CONFLICT."""
    for n, token in enumerate(tokens):
        words = [following.word for following in tokens[n : n + 4]]
        if words[:2] in (["FOR", "UPDATE"], ["FOR", "SHARE"]) or words[:4] == ["FOR", "NO", "KEY", "UPDATE"]:
            end = n + (4 if words[1] == "NO" else 2)
            if _word(tokens, end) == "OF":
                end += 2
                while _word(tokens, end) == ",":
                    end += 2
            if _word(tokens, end) in ("SKIP", "NOWAIT"):
                end += 2 if _word(tokens, end) == "SKIP" else 1
            yield _removed(text, tokens, n, end, "lock taken away")
        elif words[:2] == ["SKIP", "LOCKED"]:
            yield _removed(text, tokens, n, n + 2, "lock waits")
        elif words[:2] == ["ON", "CONFLICT"]:
            yield _removed(text, tokens, n, _end_of(tokens, n, ("RETURNING",)), "ON CONFLICT taken away")
        assert token.end <= len(text)


def _word(tokens: list[_Token], n: int) -> str:
    return tokens[n].word if n < len(tokens) else ""


def _removed(text: str, tokens: list[_Token], first: int, end: int, kind: str) -> Change:
    place = tokens[first].start, tokens[end - 1].end
    return Change(kind, f"{text[slice(*place)]} after {text[max(place[0] - 60, 0) : place[0]]}", (Edit(*place, ""),))


def _end_of(tokens: list[_Token], first: int, words: tuple[str, ...]) -> int:
    """The first token after `first` at its depth that is one of `words`, or that closes its depth."""
    depth = 0
    for n in range(first, len(tokens)):
        if tokens[n].literal:
            continue
        if tokens[n].word in ("(", "[", "{"):
            depth += 1
        elif tokens[n].word in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                return n
        elif depth == 0 and n > first and tokens[n].word in words:
            return n
    return len(tokens)


def _writes(text: str, tokens: list[_Token]) -> Iterator[Change]:
    """Make each INSERT write nothing."""
    for n, token in enumerate(tokens):
        if [token.word, _word(tokens, n + 1)] != ["INSERT", "INTO"]:
            continue
        end = _end_of(tokens, n, ("ON", "RETURNING", "FOR", "LIMIT", ";"))
        while _word(tokens, end) == "ON" and _word(tokens, end + 1) != "CONFLICT":  # of a JOIN
            end = _end_of(tokens, end, ("ON", "RETURNING", "FOR", "LIMIT", ";"))
        if _word(tokens, end) in ("LIMIT", "FOR") or end == n + 2:
            continue
        about = text[token.start : tokens[min(n + 2, len(tokens) - 1)].end]
        yield Change("INSERT left out", about, (Edit(tokens[end - 1].end, tokens[end - 1].end, " LIMIT 0"),))
