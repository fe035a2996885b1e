"""Removes secrets from text that leaves the process: log lines, and the errors of handlers.

The module knows every secret of the settings, and finds other secrets by their form. The first defence is that the
platform's own code puts no secrets into messages. This module is the second defence, because a library or a handler may
do so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote, unquote, unquote_plus, urlsplit

from pydantic import SecretStr

from leasehold.file_secrets import FileSecret, FileSecretOfMapping
from leasehold.settings import Settings

REDACTED = "[redacted]"
#: The shortest beginning of a secret that `redact_start` removes from the end of a cut text. A shorter beginning
#: reveals nothing, and innocent text may end with the same characters.
_MIN_HALF = 4
#: Secrets of fewer characters are not replaced, because innocent text would contain them.
_MIN_CHARACTERS = 8

#: A text without these marks has no secret of the forms below. Most lines have no mark, so `redact` is fast for them.
#: The first letter of "Bearer" and "Basic" is left out, because it may be upper or lower case.
_MARKS = ("X-Amz-", "://", "lh_", "earer ", "asic ")
#: Regular expressions that find secrets: the signature of a signed URL, the password in a URL, an API key, and the
#: value of the header Authorization. The named group of each is the text before the secret, which `redact` keeps.
_FORMS = (
    r"(?P<signed>X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s\"'\\<>]+",
    r"(?P<user>://[^/\s:@\"']*:)[^@/\s\"']+(?=@)",
    r"(?P<key>\blh_(?:[0-9a-z]{1,11}_)?[0-9A-Za-z]{12}_)[0-9A-Za-z_-]{20,}",
    r"(?P<scheme>\b(?:Bearer|Basic|bearer|basic) )[0-9A-Za-z._~+/=-]{8,}",
)
_secret_form = re.compile("|".join(_FORMS))
#: The secrets that `redact` knows, each in all its encodings, the longest first.
_secrets: tuple[str, ...] = ()
#: After rotations `redact` still knows at most this many earlier secrets (each encoding counts). If there are more, it
#: forgets the shortest.
_MAX_EARLIER = 200
#: Matches the comma between two URLs of one setting.
_NEXT_URL = re.compile(r",\s*(?=[a-z]+://)")


def learn(settings: Settings) -> None:
    """Let `redact` know the secrets of these settings and, when a secret's file changes, the new secret."""
    for secret in _secret_settings(settings):
        if isinstance(secret, FileSecret | FileSecretOfMapping):
            secret.on_change(lambda: _learn(settings, earlier=_secrets))
    _learn(settings)


def _learn(settings: Settings, earlier: Sequence[str] = ()) -> None:
    """Read the secrets. `earlier`: secrets that were replaced. They stay known, because they may still be valid."""
    # A default is no secret, because it stands in the documentation, and innocent text contains it.
    defaults = _secrets_of(Settings.model_construct())
    words = {encoded for secret in _secrets_of(settings) - defaults for encoded in _encodings_of(secret)}
    earlier_words = [word for word in earlier if word not in words][:_MAX_EARLIER]
    global _secrets  # noqa: PLW0603 - one process, one set of secrets
    # The longest secret comes first, because a secret may contain a shorter secret. If `redact` replaced the shorter
    # secret first, the rest of the longer secret would stay readable.
    _secrets = tuple(sorted([*words, *earlier_words], key=len, reverse=True))


def redact(text: str) -> str:
    """`text` with each secret replaced by REDACTED."""
    for word in _secrets:
        if word in text:
            text = text.replace(word, REDACTED)
    if not any(mark in text for mark in _MARKS):
        return text
    return _secret_form.sub(lambda match: f"{match[match.lastgroup or 0]}{REDACTED}", text)


def redact_start(text: str, at_most: int) -> str:
    """Redact the first `at_most` characters of the text. The rest is cut off, because a longer text would take too much
    time. The cut may split a secret, and `redact` does not recognise half a secret. So the last word before the cut is
    left out. If a known secret has several words, the text may still end with the beginning of this secret. Then the
    beginning is left out, too.
    """
    if len(text) <= at_most:
        return redact(text)
    words = text[:at_most].rsplit(maxsplit=1)
    start = words[0] if len(words) > 1 else text[:at_most]
    for secret in _secrets:
        halves = (secret[:length] for length in range(len(secret) - 1, _MIN_HALF - 1, -1))
        # The longest beginning of the secret with which the text ends, if any.
        start = start.removesuffix(next(filter(start.endswith, halves), ""))
    return redact(start)


def _secrets_of(settings: Settings) -> set[str]:
    words = {word for secret in _secret_settings(settings) for word in _words_of(secret.get_secret_value())}
    return {word for word in words if len(word) >= _MIN_CHARACTERS}


def _secret_settings(settings: Settings) -> Iterator[SecretStr]:
    """The secrets of the settings, also those in mappings."""
    for name in Settings.model_fields:
        value = getattr(settings, name)
        values = value.values() if isinstance(value, dict) else (value,)
        yield from (secret for secret in values if isinstance(secret, SecretStr))


def _words_of(secret: str) -> Iterator[str]:
    """The secret parts of a setting. In a URL only the passwords are secret: the password of the user, and the query's
    parameters with `password` in their names. RabbitMQ's setting may have several URLs. Other settings may have several
    secrets. Commas divide them (sealing keys), or colons (an id and its secret), or they are the values of a JSON
    object (the keys of cells).
    """
    if "://" not in secret:
        yield secret
        if secret.lstrip().startswith("{"):
            yield from _values_of(secret)
        else:
            yield from (part.strip() for part in re.split("[,:]", secret))
        return
    for url in _NEXT_URL.split(secret):
        yield from _passwords_of(url)


def _values_of(text: str) -> Iterator[str]:
    """The texts among the values of a JSON object. Yields nothing if `text` is no JSON object."""
    try:
        values = json.loads(text).values()
    except (ValueError, AttributeError):
        return
    yield from (value for value in values if isinstance(value, str))


def _passwords_of(url: str) -> Iterator[str]:
    """The passwords in the URL, each in two forms: as the URL has it, and decoded."""
    parts = urlsplit(url)
    if parts.password:
        yield from {parts.password, unquote(parts.password)}
    for parameter in parts.query.split("&"):
        name, _, value = parameter.partition("=")
        if "password" in name.lower():
            yield from {value, unquote(value), unquote_plus(value)}


def _encodings_of(secret: str) -> set[str]:
    """The secret as it is, in JSON, and in a URL."""
    in_json = {json.dumps(secret, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    return {secret, quote(secret, safe=""), *in_json}
