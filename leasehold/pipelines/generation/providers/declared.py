"""A provider (a service that makes images or videos) that the settings declare. Its requests are templates, and JSON
pointers read its answers.

In a template, `{prompt}` and the other names in PLACEHOLDERS stand for the values of the order. `{ref}` stands for the
provider's id of the order, and `{credential}` for the credential, which only headers may contain. If a text is only a
placeholder, it becomes the value itself, so that a number stays a number. If the order has no value for such a
placeholder, the member of the body or the header is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote, unquote

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from leasehold.domain.errors import DeclarationError
from leasehold.domain.json_pointer import value_at
from leasehold.pipelines.generation.provider import Accepted, Finished, Order, Rejected, Working
from leasehold.pipelines.generation.providers.requests import (
    ProviderAnswer,
    RequestSender,
    bad_answer,
    id_at,
    no_files,
    urls_in,
)

#: The names of the placeholders for an order's values.
PLACEHOLDERS = frozenset(
    {
        "prompt", "model", "negative_prompt", "width", "height", "sample_strength", "image", "images", "is_pro",
        "duration_ms", "duration_seconds", "ratio", "token", "kind", "callback",
    }
)  # fmt: skip
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
#: A JSON pointer into the provider's answer.
Pointer = Annotated[str, Field(pattern=r"^(/[^/]*)*$")]


class RequestTemplate(BaseModel):
    """The template of one request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["GET", "POST", "PUT", "DELETE"] = "POST"
    url: str = Field(pattern=r"^https?://")
    headers: dict[str, str] = {}
    body: dict[str, Any] | None = None


class Declaration(BaseModel):
    """One declared provider. Every provider needs `submit` and `urls`. If the answer to `submit` does not have the
    links to the files yet, the provider also needs `ref`, `poll`, `status` and `statuses`.

    Pointers into an answer: `ref` (the provider's id of the order), `status`, `urls` (the links to the files), `error`
    (a message) and `fail_code` (the provider's own code). `statuses`: the meaning of each status of the provider. A
    status that is not a text is written here as in JSON (`true`, `2`). `token_header`: the header for the idempotency
    token. Name the header only if the provider promises that a second order with the same token buys nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")
    submit: RequestTemplate
    ref: Pointer | None = None
    poll: RequestTemplate | None = None
    status: Pointer | None = None
    statuses: dict[str, Literal["working", "made", "failed"]] = {}
    urls: Pointer
    separator: str | None = Field(None, min_length=1, description="Between the links, if they come as one text.")
    error: Pointer | None = None
    fail_code: Pointer | None = None
    cancel: RequestTemplate | None = None
    token_header: str | None = None
    # The timeout of a submit. It is shorter than the timeout of the step `submit`, which is three minutes.
    submit_seconds: float = Field(60.0, gt=0, le=170)

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        members_for_polls = (self.ref, self.poll, self.status, self.statuses)
        if any(members_for_polls) and not all(members_for_polls):
            raise ValueError("ref, poll, status and statuses belong together")
        for request, names in (
            (self.submit, PLACEHOLDERS),
            (self.poll, PLACEHOLDERS | {"ref"}),
            (self.cancel, PLACEHOLDERS | {"ref"}),
        ):
            if request is not None:
                _check_placeholders(request, names)
        return self


def _check_placeholders(request: RequestTemplate, names: frozenset[str]) -> None:
    """Raises ValueError for a placeholder that is not in `names`. Headers may also contain `{credential}`."""
    for texts, allowed in (
        ([request.url, request.body], names),
        (list(request.headers.values()), names | {"credential"}),
    ):
        if unknown := {name for text in _texts_in(texts) for name in _PLACEHOLDER.findall(text)} - allowed:
            raise ValueError(f"unknown placeholders: {', '.join(sorted(unknown))}")


def _texts_in(value: Any) -> list[str]:
    """All texts in a template."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list) else []


def declarations(source: str) -> list[Declaration]:
    """The declarations in `source`, the value of the setting: an empty text, a JSON list, or the path of a file with a
    JSON list.

    Raises DeclarationError.
    """
    if not source.strip():
        return []
    try:
        text = source if source.lstrip().startswith("[") else Path(source).read_text(encoding="utf-8")
        return TypeAdapter(list[Declaration]).validate_json(text)
    except OSError as error:
        raise DeclarationError(f"generation_http_providers: cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DeclarationError(f"generation_http_providers: {source} is not UTF-8") from None
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first_error["loc"])
        raise DeclarationError(f"generation_http_providers: {place or 'the list'}: {first_error['msg']}") from None


class Declared:
    """The client of a declared provider. The Protocol `Provider` (provider.py) explains the methods."""

    def __init__(self, sender: RequestSender, declaration: Declaration) -> None:
        self._sender = sender
        self._declaration = declaration

    @property
    def name(self) -> str:
        return self._declaration.name

    @property
    def honours_token(self) -> bool:
        """Whether the provider sells nothing more for an order whose idempotency token it has seen before."""
        return self._declaration.token_header is not None

    async def submit(self, order: Order, credential: str) -> Accepted | Finished:
        token_header = {self._declaration.token_header: order.token} if self._declaration.token_header else {}
        answer = await self._send(self._declaration.submit, order, credential, headers=token_header, buys=True)
        self._check_answer(answer)
        if self._declaration.ref is None:
            return self._finished_order(answer)
        return Accepted(id_at(answer.body, self._declaration.ref))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
        assert self._declaration.poll is not None  # without `poll`, `submit` has returned Finished, so nobody polls
        assert self._declaration.status is not None
        answer = await self._send(self._declaration.poll, order, credential, ref)
        self._check_answer(answer)
        found = value_at(answer.body, self._declaration.status)
        status = found if isinstance(found, str) else orjson.dumps(found).decode()
        match self._declaration.statuses.get(status):
            case "working":
                return Working(status[:100], after=answer.after)
            case "made":
                return self._finished_order(answer)
            case "failed":
                raise Rejected(
                    "provider_failed", self._message(answer) or "The generation failed.", fail_code=self._code(answer)
                )
        raise bad_answer("has a status that is not declared")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        if self._declaration.cancel is None:
            return False
        return (await self._send(self._declaration.cancel, order, credential, ref)).stopped()

    async def _send(
        self,
        template: RequestTemplate,
        order: Order,
        credential: str,
        ref: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        buys: bool = False,
    ) -> ProviderAnswer:
        """Send the request of this template. `buys`: whether the request is an order, which may cost money."""
        values = _values_of(order) | {"ref": ref}
        body = None if template.body is None else _fill(template.body, values)
        if body is not None and buys:
            body |= order.extra or {}  # `extra`: members that the client wrote for this provider
        filled_headers = _fill(template.headers, values | {"credential": credential})
        return await self._sender.send(
            template.method,
            _fill_url(template.url, values),
            headers={name: _text_of(value) for name, value in filled_headers.items()} | dict(headers or {}),
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
            seconds=self._declaration.submit_seconds if buys else 30.0,
        )

    def _check_answer(self, answer: ProviderAnswer) -> None:
        if not answer.is_success:
            raise answer.refusal(self._message(answer), self._code(answer))
        if not isinstance(answer.body, dict | list):
            raise bad_answer("is not JSON")

    def _finished_order(self, answer: ProviderAnswer) -> Finished:
        output = value_at(answer.body, self._declaration.urls)
        if isinstance(output, str) and self._declaration.separator:
            output = [part.strip() for part in output.split(self._declaration.separator)]
        urls = urls_in(output)
        if not urls:
            raise no_files()
        return Finished(urls)

    def _message(self, answer: ProviderAnswer) -> str:
        message = value_at(answer.body, self._declaration.error) if self._declaration.error else None
        return message[:500] if isinstance(message, str) else ""

    def _code(self, answer: ProviderAnswer) -> str | None:
        code = value_at(answer.body, self._declaration.fail_code) if self._declaration.fail_code else None
        return None if code is None else str(code)[:100]


def _values_of(order: Order) -> dict[str, Any]:
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


def _fill(template: Any, values: Mapping[str, Any]) -> Any:
    """The template with `values` in place of the placeholders. A member or an item is left out if it is only a
    placeholder, and this placeholder has no value. A null in the template stays.
    """
    if isinstance(template, dict):
        return {name: _fill(member, values) for name, member in template.items() if not _lacks_value(member, values)}
    if isinstance(template, list):
        return [_fill(item, values) for item in template if not _lacks_value(item, values)]
    if not isinstance(template, str):
        return template
    if only_placeholder := _PLACEHOLDER.fullmatch(template):
        return values.get(only_placeholder[1])
    return _PLACEHOLDER.sub(lambda match: _text_of(values.get(match[1])), template)


def _fill_url(template: str, values: Mapping[str, Any]) -> str:
    """The URL with `values`, percent-encoded, in place of the placeholders. Raises Rejected if a value would change the
    path, because the credential would then go to another path. A value such as `..` would change it, because HTTP
    libraries and proxies remove a part `..` together with the part before it. Some of them decode the path first, so
    the encoding alone does not help.
    """
    parts = re.split(r"([/?#])", template)
    in_path = True
    for index, part in enumerate(parts):
        in_path = in_path and part not in ("?", "#")
        filled = _PLACEHOLDER.sub(lambda match: quote(_text_of(values.get(match[1])), safe=""), part)
        if in_path and filled != part and _changes_path(filled):
            raise Rejected("path_malformed", f"The value of {part} would change the path of the provider's URL.")
        parts[index] = filled
    return "".join(parts)


def _changes_path(part: str) -> bool:
    """Whether a part of a URL's path is empty, or contains a part `.` or `..` after one or two decodings."""
    decoded = unquote(part)
    names = {name for text in (decoded, unquote(decoded)) for name in re.split(r"[/\\;]", text)}
    return not part or not names.isdisjoint((".", ".."))


def _lacks_value(template: Any, values: Mapping[str, Any]) -> bool:
    """Whether the template is only a placeholder for which there is no value."""
    only_placeholder = _PLACEHOLDER.fullmatch(template) if isinstance(template, str) else None
    return only_placeholder is not None and values.get(only_placeholder[1]) is None


def _text_of(value: Any) -> str:
    """How a value of an order is written inside a text. A value that is None becomes an empty text, and a boolean
    becomes `true` or `false`.
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
