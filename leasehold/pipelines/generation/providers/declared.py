"""A provider that is declared and not programmed: its requests are templates, its answers are read by JSON pointers.

In a template, `{prompt}` and the other words of WORDS stand for what was ordered. A text that is nothing but one word
becomes the value itself (a number stays one), and a member whose word has no value is left out. `{ref}` is the name
that the provider gave; `{credential}` may stand in headers alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from leasehold.domain.errors import DeclarationError
from leasehold.pipelines.generation.provider import Made, Order, Rejected, Taken, Working
from leasehold.pipelines.generation.providers.asking import Asker, Heard, bad_answer, no_files, urls_in

#: What an order may be asked for.
WORDS = frozenset(
    {
        "prompt", "model", "negative_prompt", "width", "height", "sample_strength", "image", "images", "is_pro",
        "duration_ms", "duration_seconds", "ratio", "token", "kind", "callback",
    }
)  # fmt: skip
_WORD = re.compile(r"\{([a-z_]+)\}")
Pointer = Annotated[str, Field(pattern=r"^(/[^/]*)*$")]


class Asked(BaseModel):
    """One kind of request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["GET", "POST", "PUT", "DELETE"] = "POST"
    url: str = Field(pattern=r"^https?://")
    headers: dict[str, str] = {}
    body: dict[str, Any] | None = None


class Declaration(BaseModel):
    """`ref` or, of a provider that answers with the files at once, only `urls`. `statuses`: its words, in ours.

    `token_header`: the header that makes a repeated submit the same one; only name it if the provider promises so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")
    submit: Asked
    ref: Pointer | None = None
    poll: Asked | None = None
    status: Pointer | None = None
    statuses: dict[str, Literal["working", "made", "failed"]] = {}
    urls: Pointer
    separator: str | None = Field(None, min_length=1, description="Between links, where they come as one text.")
    error: Pointer | None = None
    fail_code: Pointer | None = None
    cancel: Asked | None = None
    token_header: str | None = None
    submit_seconds: float = Field(60.0, gt=0, le=170)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        polls = (self.ref, self.poll, self.status)
        if any(polls) != all(polls) or (self.poll is not None and not self.statuses):
            raise ValueError("ref, poll, status and statuses belong together")
        for asked, more in ((self.submit, set[str]()), (self.poll, {"ref"}), (self.cancel, {"ref"})):
            if asked is not None:
                _check_words(asked, more)
        return self


def _check_words(asked: Asked, more: set[str]) -> None:
    for texts, allowed in (
        ([asked.url, asked.body], WORDS | more),
        (list(asked.headers.values()), WORDS | more | {"credential"}),
    ):
        if unknown := {word for text in _texts(texts) for word in _WORD.findall(text)} - allowed:
            raise ValueError(f"no such words: {', '.join(sorted(unknown))}")


def _texts(found: Any) -> list[str]:
    if isinstance(found, str):
        return [found]
    if isinstance(found, dict):
        found = list(found.values())
    return [text for one in found for text in _texts(one)] if isinstance(found, list) else []


def declarations(source: str) -> list[Declaration]:
    """What the setting says: nothing, a JSON list, or the path of a file that holds one. Raises DeclarationError."""
    if not source.strip():
        return []
    try:
        text = source if source.lstrip().startswith("[") else Path(source).read_text()
        return TypeAdapter(list[Declaration]).validate_json(text)
    except OSError as error:
        raise DeclarationError(f"generation_http_providers: cannot read {source}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DeclarationError(f"generation_http_providers: {where or 'the list'}: {first['msg']}") from None


class Declared:
    """A provider by its declaration."""

    def __init__(self, asker: Asker, declaration: Declaration) -> None:
        self._asker = asker
        self._said = declaration

    @property
    def name(self) -> str:
        return self._said.name

    @property
    def takes_token(self) -> bool:
        return self._said.token_header is not None

    async def submit(self, order: Order, credential: str) -> Taken | Made:
        more = {self._said.token_header: order.token} if self._said.token_header else {}
        heard = await self._ask(self._said.submit, order, credential, headers=more, buys=True)
        self._check(heard)
        if self._said.ref is None:
            return self._made(heard)
        ref = _at(heard.said, self._said.ref)
        if not isinstance(ref, str | int) or ref == "":
            raise bad_answer(f"has nothing at {self._said.ref}")
        return Taken(str(ref))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:
        assert self._said.poll is not None  # nothing was taken otherwise
        assert self._said.status is not None
        heard = await self._ask(self._said.poll, order, credential, ref)
        self._check(heard)
        status = _at(heard.said, self._said.status)
        match self._said.statuses.get(str(status)):
            case "working":
                return Working(str(status)[:100], heard.after)
            case "made":
                return self._made(heard)
            case "failed":
                raise Rejected("provider_failed", self._message(heard) or "It failed.", fail_code=self._code(heard))
        raise bad_answer("has a status that is not declared")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        if self._said.cancel is None:
            return False
        return (await self._ask(self._said.cancel, order, credential, ref)).stopped()

    async def _ask(
        self,
        asked: Asked,
        order: Order,
        credential: str,
        ref: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        buys: bool = False,
    ) -> Heard:
        words = _values(order) | {"ref": ref}
        body = None if asked.body is None else _filled(asked.body, words)
        if body is not None and buys:
            body |= order.extra or {}
        told = {name: str(_filled(text, words | {"credential": credential})) for name, text in asked.headers.items()}
        return await self._asker.ask(
            asked.method,
            _WORD.sub(lambda word: quote(str(words.get(word[1]) or ""), safe=""), asked.url),
            headers=told | dict(headers or {}),
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
            seconds=self._said.submit_seconds if buys else 30.0,
        )

    def _check(self, heard: Heard) -> None:
        if not heard.good:
            raise heard.refusal(self._message(heard), self._code(heard))
        if not isinstance(heard.said, dict | list):
            raise bad_answer("is no JSON")

    def _made(self, heard: Heard) -> Made:
        found = _at(heard.said, self._said.urls)
        if isinstance(found, str) and self._said.separator:
            found = [part.strip() for part in found.split(self._said.separator)]
        urls = urls_in(found)
        if not urls:
            raise no_files()
        return Made(urls)

    def _message(self, heard: Heard) -> str:
        found = _at(heard.said, self._said.error) if self._said.error else None
        return found[:500] if isinstance(found, str) else ""

    def _code(self, heard: Heard) -> str | None:
        found = _at(heard.said, self._said.fail_code) if self._said.fail_code else None
        return None if found is None else str(found)[:100]


def _values(order: Order) -> dict[str, Any]:
    return {
        "prompt": order.prompt,
        "model": order.model,
        "negative_prompt": order.negative_prompt,
        "width": order.width,
        "height": order.height,
        "sample_strength": order.sample_strength,
        "image": order.images[0].url if order.images else None,
        "images": [image.url for image in order.images] or None,
        "is_pro": order.is_pro,
        "duration_ms": order.duration_ms,
        "duration_seconds": None if order.duration_ms is None else order.duration_ms / 1000,
        "ratio": order.ratio,
        "token": order.token,
        "kind": order.kind,
        "callback": order.callback,
    }


def _filled(template: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(template, dict):
        filled = {name: _filled(one, words) for name, one in template.items()}
        return {name: value for name, value in filled.items() if value is not None}
    if isinstance(template, list):
        return [value for one in template if (value := _filled(one, words)) is not None]
    if not isinstance(template, str):
        return template
    if alone := _WORD.fullmatch(template):
        return words.get(alone[1])
    return _WORD.sub(lambda word: str(words.get(word[1]) if words.get(word[1]) is not None else ""), template)


def _at(said: Any, pointer: str) -> Any:
    """RFC 6901; None where it leads nowhere."""
    found = said
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
