"""Parts of the sentences that people read in errors, explanations and pages."""

from __future__ import annotations


def full_stop(text: str) -> str:
    """The text with one full stop at its end. For a text that ends a sentence and comes from elsewhere, such as the
    text of an error: some have a full stop already, and some end with another mark.
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
