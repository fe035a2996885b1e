"""Parts of the sentences that people read in errors, explanations and pages."""

from __future__ import annotations

from datetime import datetime


def full_stop(text: str) -> str:
    """The text with a full stop at its end. A text that ends with `.`, `!`, `?` or `…` stays as it is. Use this for a
    sentence whose end comes from elsewhere, for example from the text of an error.
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def counted(number: int, one: str, many: str) -> str:
    """The number with its noun, such as "1 job" and "2,000 jobs"."""
    return f"{number:,} {one if number == 1 else many}"


def with_article(name: str) -> str:
    """The name of a type with its article, such as "a str" and "an int"."""
    return f"{'an' if name[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {name}"


def to_the_second(at: datetime) -> str:
    """The instant in ISO 8601 for sentences, without fractions of a second. (HTTP answers have the fractions.)"""
    return at.isoformat(timespec="seconds")
