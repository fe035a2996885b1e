"""Parts of the sentences that people read in errors, explanations and pages."""

from __future__ import annotations

from datetime import datetime


def full_stop(text: str) -> str:
    """The text with one full stop at its end. For a text that ends a sentence and comes from elsewhere, such as the
    text of an error: some have a full stop already, and some end with another mark.
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
    """The instant, as sentences show it. The fields of an answer have the whole instant."""
    return at.isoformat(timespec="seconds")
