"""Taking secrets out of text that leaves the process: log lines, and what a handler's error says.

Known ones are every secret of the settings; the others are known by their form. Nothing here is the first defence:
code does not put secrets into messages. It is for the library, and the handler, that does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote, urlsplit

from pydantic import SecretStr

from leasehold.settings import Settings

REDACTED = "[redacted]"
#: A shorter word of the settings would be found in innocent text.
_LEAST_CHARACTERS = 8

#: Form by form, with what every text that has it contains: most lines contain none, and a search by form takes long.
_MARKS = ("X-Amz-", "://", "lh_", "earer ", "asic ")
_FORMS = (
    r"(?P<signed>X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s\"'\\<>]+",
    r"(?P<user>://[^/\s:@\"']*:)[^@/\s\"']+(?=@)",
    r"(?P<key>\blh_[0-9A-Za-z]{12}_)[0-9A-Za-z_-]{20,}",
    r"(?P<scheme>\b(?:Bearer|Basic|bearer|basic) )[0-9A-Za-z._~+/=-]{8,}",
)
_by_form = re.compile("|".join(_FORMS))
_known: tuple[str, ...] = ()


def learn(settings: Settings) -> None:
    """From now on `redact` knows the secrets of these settings."""
    defaults = _secrets_of(Settings.model_construct())
    words = {form for secret in _secrets_of(settings) - defaults for form in _forms_of(secret)}
    global _known  # noqa: PLW0603 - one process, one set of secrets
    _known = tuple(sorted(words, key=len, reverse=True))


def redact(text: str) -> str:
    for word in _known:
        if word in text:
            text = text.replace(word, REDACTED)
    if not any(mark in text for mark in _MARKS):
        return text
    return _by_form.sub(lambda found: f"{found[found.lastgroup or 0]}{REDACTED}", text)


def _secrets_of(settings: Settings) -> set[str]:
    values = (getattr(settings, name) for name in Settings.model_fields)
    found = {word for value in values if isinstance(value, SecretStr) for word in _words_of(value.get_secret_value())}
    return {word for word in found if len(word) >= _LEAST_CHARACTERS}


def _words_of(secret: str) -> Iterator[str]:
    """A URL's secret is its password; its host may be told."""
    if "://" not in secret:
        yield secret
    elif password := urlsplit(secret).password:
        yield from {password, unquote(password)}


def _forms_of(secret: str) -> set[str]:
    """As it is, in JSON, and in a URL."""
    in_json = {json.dumps(secret, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    return {secret, quote(secret, safe=""), *in_json}
