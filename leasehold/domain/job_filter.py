"""Parses the filter language of jobs: `kind:media status:failed tag.customer:7 created:<1h "no space left"`.

The API and the command line use this module. Every error names a character of the filter. In most cases this is the
first character of the wrong term or value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from leasehold.domain.cron import FIRST, LAST
from leasehold.domain.errors import Invalid
from leasehold.domain.json_pointer import path_of
from leasehold.domain.states import JobState
from leasehold.domain.tags import NAME

#: A filter has at most this many characters, and this many terms.
MAX_CHARACTERS, MAX_TERMS = 1000, 20
#: The name of a kind. The next pattern is for the name of a queue or of a template.
_WORD = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_ANY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")
#: A length of time: `90s`, `2h`.
_LENGTH = re.compile(r"([0-9]{1,6})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
#: The key of a term, with its colon: `kind:`, `tag.customer:`, `payload./a/b:`. A term without a key is a text.
_KEY = re.compile(r'([a-z]+)(?:\.([^\s":]*))?:')
#: A value in quotes (group 1 is the text between them), and an escaped character in such a value.
_QUOTED, _ESCAPE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL), re.compile(r"\\(.)", re.DOTALL)
#: A value that needs no quotes.
_PLAIN = re.compile(r'[^\s"]+')
_KEYS = (
    "kind", "status", "queue", "template", "tenant", "code", "tag", "created", "waited", "duration", "worker",
    "schedule", "payload",
)  # fmt: skip


class InvalidFilter(Invalid):
    """A filter that cannot be used. `position`: the character that the error names, counted from 1. `pointer`: the JSON
    pointer to the filter in a body; None: the filter is the query parameter `q`.
    """

    pointer: str | None = None

    def __init__(self, position: int, sentence: str, code: str = "invalid_filter") -> None:
        super().__init__(code, f"At character {position}: {sentence}")
        self.position = position
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class Range:
    """A range of seconds: more than `above`, and less than `below`. None: no such bound."""

    above: float | None = None
    below: float | None = None


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The terms of a filter. A job must fulfil all of them. A field is None or empty if the filter has no such term.

    `waited`: for how many seconds the job has waited for its start. `duration`: for how many seconds it has run.
    `payload`: for each such term, the JSON pointer (split into keys and list positions), and the value that the payload
    must have there. `positions`, for errors: key of a term -> the character at which the first such term begins.
    """

    kind: str | None = None
    status: JobState | None = None
    queue: str | None = None
    template: str | None = None
    tenant: str | None = None
    code: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    created_after: datetime | None = None
    created_before: datetime | None = None
    waited: Range | None = None
    duration: Range | None = None
    worker: UUID | None = None
    schedule: UUID | None = None
    payload: tuple[tuple[tuple[str, ...], str], ...] = ()
    texts: tuple[str, ...] = ()
    positions: dict[str, int] = field(default_factory=dict)

    def refused(self, key: str, sentence: str, code: str = "invalid_filter") -> InvalidFilter:
        """The error about the term with this key. If the filter has no such term, the error names character 1."""
        return InvalidFilter(self.positions.get(key, 1), sentence, code)


@dataclass(slots=True)
class _Term:
    """`KEY:VALUE`, `KEY.DETAIL:VALUE`, or a text. `position` and `value_position`: the first characters of the term and
    of its value, counted from 1.
    """

    key: str  # empty: the term is a text
    detail: str | None  # NAME of `tag.NAME`, POINTER of `payload.POINTER`
    value: str
    position: int
    value_position: int


def parse(text: str, now: datetime) -> JobFilter:
    """The filter that `text` describes. Ages are counted from `now`. Raises InvalidFilter."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidFilter(MAX_CHARACTERS + 1, f"A filter has at most {MAX_CHARACTERS} characters.")
    terms = _split_terms(text)
    if len(terms) > MAX_TERMS:
        raise InvalidFilter(terms[MAX_TERMS].position, f"A filter has at most {MAX_TERMS} terms.")
    builder = _FilterBuilder(now)
    for term in terms:
        builder.add(term)
    return builder.filter()


def quoted(value: str) -> str:
    """The value as a filter contains it: in quotes if it needs them. The value must not be empty, because `parse`
    refuses a term without a value.
    """
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _split_terms(text: str) -> list[_Term]:
    """Split the filter into terms. A term that does not begin with a key is a text. Raises InvalidFilter."""
    terms: list[_Term] = []
    index = 0
    while index < len(text):
        if text[index].isspace():
            index += 1
            continue
        start = index
        key = _KEY.match(text, index)
        if key is not None:
            index = key.end()
        value_start = index
        value, index = _read_value(text, index)
        if key is None:
            terms.append(_Term("", None, value, start + 1, value_start + 1))
        elif key[1] not in _KEYS:
            raise InvalidFilter(
                start + 1,
                f'There is no term `{key[1]}:`. Write text with a colon as "{key[0]}...". Terms: {_all_terms()}.',
            )
        else:
            terms.append(_Term(key[1], key[2], value, start + 1, value_start + 1))
    return terms


def _all_terms() -> str:
    return ", ".join(key + {"tag": ".NAME", "payload": "./POINTER"}.get(key, "") for key in _KEYS)


def _read_value(text: str, start: int) -> tuple[str, int]:
    """The value that begins at `start`, without its quotes, and the index after it. Raises InvalidFilter."""
    if start >= len(text) or text[start].isspace():
        raise InvalidFilter(start + 1, "A value is missing.")
    if text[start] != '"':
        end = start
        while end < len(text) and not text[end].isspace():
            if text[end] == '"':
                raise InvalidFilter(
                    end + 1,
                    'A quote may stand only at the beginning of a value. Inside a quoted value write \\".',
                )
            end += 1
        return text[start:end], end
    quoted_match = _QUOTED.match(text, start)
    if quoted_match is None:
        raise InvalidFilter(start + 1, "The quote is not closed.")
    if quoted_match.end() < len(text) and not text[quoted_match.end()].isspace():
        raise InvalidFilter(quoted_match.end() + 1, "A space must follow the closing quote.")
    if not quoted_match[1]:
        raise InvalidFilter(start + 1, "A value is missing.")
    return _ESCAPE.sub(r"\1", quoted_match[1]), quoted_match.end()


class _FilterBuilder:
    """Collects the terms of a filter, and checks each term."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._fields: dict[str, Any] = {}
        self._tags: dict[str, str] = {}
        self._payload: list[tuple[tuple[str, ...], str]] = []
        self._texts: list[str] = []
        self._positions: dict[str, int] = {}
        # The key of a term -> the function that adds the term. The terms of all other keys are read by _READERS, occur
        # at most once, and are the value of one field.
        self._adders: dict[str, Callable[[_Term], None]] = {
            "": lambda term: self._texts.append(term.value),
            "tag": self._add_tag,
            "payload": lambda term: self._payload.append((_read_pointer(term), term.value)),
            "created": self._add_created,
            "waited": self._add_range,
            "duration": self._add_range,
        }

    def filter(self) -> JobFilter:
        return JobFilter(
            tags=tuple(self._tags.items()),
            payload=tuple(self._payload),
            texts=tuple(self._texts),
            positions=self._positions,
            **self._fields,
        )

    def add(self, term: _Term) -> None:
        if term.detail is not None and term.key not in ("tag", "payload"):
            raise InvalidFilter(term.position, f"`{term.key}:` takes no name after a dot.")
        self._positions.setdefault(term.key or "text", term.position)
        adder = self._adders.get(term.key)
        if adder is not None:
            adder(term)
        else:  # the term's value becomes the field that has the key as its name
            self._set(term, term.key, _READERS[term.key](term))

    def _set(self, term: _Term, name: str, value: object) -> None:
        if name in self._fields:
            raise InvalidFilter(term.position, f"The filter has `{term.key}:` twice.")
        self._fields[name] = value

    def _add_tag(self, term: _Term) -> None:
        name = term.detail or ""
        if not NAME.fullmatch(name):
            raise InvalidFilter(term.position, "Write a tag as `tag.NAME:VALUE`; a name begins with a small letter.")
        if self._tags.setdefault(name, term.value) != term.value:
            raise InvalidFilter(term.position, f"No job has two values of the tag {name}.")

    def _add_created(self, term: _Term) -> None:
        """Add an age or a date. `>2h` means created before the instant two hours ago. A date stands for its first
        instant in UTC: `>2026-11-20` means created at that instant or later, so on that day or after it. `<2026-11-20`
        means created before that instant.
        """
        sign, operand = _comparison(term)
        age = _LENGTH.fullmatch(operand)
        if age is not None:  # a greater age means created earlier, so the sign is reversed
            name = "created_before" if sign == ">" else "created_after"
            self._set(term, name, _instant_before(self._now, _length_of(age)))
        else:
            self._set(term, "created_after" if sign == ">" else "created_before", _read_instant(term, operand))

    def _add_range(self, term: _Term) -> None:
        sign, operand = _comparison(term)
        length = _LENGTH.fullmatch(operand)
        if length is None:
            raise InvalidFilter(term.value_position + 1, "Write a length of time such as 90s, 10m, 2h, 3d or 1w.")
        # Each term sets one of the two bounds, so a filter may have `waited:>1m` and `waited:<1h`.
        bounds: Range = self._fields.get(term.key) or Range()
        if (bounds.above if sign == ">" else bounds.below) is not None:
            raise InvalidFilter(term.position, f"The filter has `{term.key}:{sign}` twice.")
        seconds = _length_of(length).total_seconds()
        self._fields[term.key] = Range(seconds, bounds.below) if sign == ">" else Range(bounds.above, seconds)


def _comparison(term: _Term) -> tuple[str, str]:
    """The sign (`<` or `>`) and the operand of the term's value. Raises InvalidFilter without a sign."""
    if term.value[0] not in "<>":
        raise InvalidFilter(term.value_position, f"Write `{term.key}:>...` or `{term.key}:<...`.")
    return term.value[0], term.value[1:]


def _length_of(match: re.Match[str]) -> timedelta:
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _instant_before(now: datetime, length: timedelta) -> datetime:
    """The instant `length` before now, but not before FIRST, the first instant that a filter can name."""
    return FIRST if length >= now - FIRST else now - length


def _read_instant(term: _Term, text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidFilter(term.value_position + 1, "Write an age such as 2h, or a date such as 2026-11-20.") from None
    instant = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    if not FIRST <= instant <= LAST:
        raise InvalidFilter(term.value_position + 1, "The date is out of range.")
    return instant.astimezone(UTC)


def _read_pointer(term: _Term) -> tuple[str, ...]:
    pointer = term.detail or ""
    if not pointer.startswith("/"):
        raise InvalidFilter(term.position, "Write `payload./POINTER:VALUE`, with a JSON pointer such as /customer/id.")
    return tuple(path_of(pointer))


def _reader_of_names(pattern: re.Pattern[str]) -> Callable[[_Term], str]:
    """Make a function that reads the value of a term, and refuses a value that does not match the pattern."""

    def read(term: _Term) -> str:
        if not pattern.fullmatch(term.value):
            raise InvalidFilter(term.value_position, f"This value does not have the form of a name for `{term.key}:`.")
        return term.value

    return read


def _read_status(term: _Term) -> JobState:
    try:
        return JobState(term.value)
    except ValueError:
        raise InvalidFilter(
            term.value_position, f"There is no such status. There are: {', '.join(JobState)}."
        ) from None


def _read_id(term: _Term) -> UUID:
    try:
        return UUID(term.value)
    except ValueError:
        raise InvalidFilter(term.value_position, "Write an id such as 01a1fb52-86fe-7471-a0ae-c754b8f77f84.") from None


#: The key of a term -> the function that reads the term's value. All other keys have a function in
#: `_FilterBuilder._adders`.
_READERS: dict[str, Callable[[_Term], object]] = {
    "kind": _reader_of_names(_WORD),
    "status": _read_status,
    "queue": _reader_of_names(_ANY_NAME),
    "template": _reader_of_names(_ANY_NAME),
    # These two accept any text, because a handler chooses its codes freely, and an installation chooses the names of
    # its tenants.
    "tenant": lambda term: term.value,
    "code": lambda term: term.value,
    "worker": _read_id,
    "schedule": _read_id,
}
