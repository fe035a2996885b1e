"""The provider fal, an outside service that makes images and videos, through its queue. The queue honours no
idempotency token. It keeps a result for an hour, but a result of 10 KB or more only for six minutes.

The API: https://fal.ai/docs/api-reference/inference-api. The states:
https://fal.ai/docs/documentation/model-apis/inference/queue. The errors of a model:
https://fal.ai/docs/documentation/model-apis/errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from leasehold.pipelines.generation.provider import Accepted, Finished, Order, Rejected, Working
from leasehold.pipelines.generation.providers.requests import (
    ProviderAnswer,
    RequestSender,
    as_mapping,
    bad_answer,
    no_files,
    text_at,
    urls_in,
)

#: The fields of a result in which fal's models return files. A link in another field, such as the prompt, does not
#: count as a file.
_FILES = ("images", "image", "videos", "video")
#: A model's id may begin with one of these namespaces. Then the owner is the second part of the id.
_NAMESPACES = frozenset({"workflows", "comfy"})
#: A type of error of fal -> the platform's error code. Any other type gets the code `provider_failed`.
_CODES = {"content_policy_violation": "content_refused"}
#: The status of an answer if fal does not know the request. Any other answer that rejects a request for the result of
#: an order comes from the model, and means that the order has failed.
_UNKNOWN = 404


class Fal:
    """The client of fal. A model is `owner/app`, often followed by the path of an endpoint."""

    name = "fal"
    honours_token = False  # fal ignores the order's idempotency token

    def __init__(self, sender: RequestSender, base_url: str) -> None:
        self._sender = sender
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Accepted:
        _app_of(order)  # raises Rejected if the order has no model of fal
        path = f"/{quote(order.model or '')}"
        if order.callback and order.callback.startswith("https://"):
            path += f"?{urlencode({'fal_webhook': order.callback})}"
        headers = {}
        if order.deadline_seconds:
            headers["x-fal-request-timeout"] = str(order.deadline_seconds)  # how long fal may wait before it begins
        answer = await self._send("POST", path, credential, _inputs(order), headers, buys=True)
        return Accepted(text_at(_body_of(answer), "request_id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
        request = _request_path(ref, order)
        body = _body_of(await self._send("GET", f"{request}/status", credential))
        status = text_at(body, "status")
        if status in ("IN_QUEUE", "IN_PROGRESS"):
            return Working(status)
        if status != "COMPLETED":
            raise bad_answer("has a status that is not documented")
        # A failed order also has the status COMPLETED. Either the answer with this status has an error, or fal answers
        # the request for the result with an error.
        if body.get("error"):
            raise _failure(str(body["error"]), str(body.get("error_type") or "") or None)
        result = await self._send("GET", request, credential)
        try:
            output = _body_of(result)
        except Rejected:
            if result.status == _UNKNOWN:
                raise
            raise _failure(*_error_in(result.body)) from None
        urls = urls_in([output[field] for field in _FILES if field in output])
        if not urls:
            raise no_files()
        return Finished(urls)

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        """Ask fal to stop the order. Returns whether fal has stopped it."""
        answer = await self._send("PUT", f"{_request_path(ref, order)}/cancel", credential)
        return answer.stopped()

    async def _send(
        self,
        method: str,
        path: str,
        credential: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        buys: bool = False,
    ) -> ProviderAnswer:
        """Send the request to `path` below fal's address. `buys`: the request is an order, which may cost money."""
        return await self._sender.send(
            method,
            self._url + path,
            headers={"authorization": f"Key {credential}", **(headers or {})},
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
        )


def _app_of(order: Order) -> str:
    """The part `owner/app` of the order's model, with its namespace if it has one. Raises Rejected if there is no such
    part.
    """
    if not order.model:
        raise Rejected("model_required", "fal has no default model: name a model.")
    parts = order.model.split("/")
    app_parts = 3 if parts[0] in _NAMESPACES else 2
    # Refuse a part that is empty, `.` or `..`, because such a part would change the URL's path.
    if len(parts) < app_parts or not all(part.strip(".") for part in parts):
        raise Rejected("model_required", "A model of fal is `owner/app`, or `owner/app` and the path of an endpoint.")
    return "/".join(parts[:app_parts])


def _request_path(ref: str, order: Order) -> str:
    """The path of the request `ref` in fal's queue. fal's answer to a submit contains whole URLs of the request. This
    module does not use them, because an answer must not choose where the credential is sent.
    """
    return f"/{quote(_app_of(order))}/requests/{quote(ref, safe='')}"


def _inputs(order: Order) -> dict[str, Any]:
    """The model's inputs, by the names that most models use. A field in the order's `extra` replaces an input of the
    same name.
    """
    images = [image.url for image in order.images]
    size = {"width": order.width, "height": order.height} if order.width and order.height else None
    inputs: dict[str, Any] = {
        "prompt": order.prompt,
        "negative_prompt": order.negative_prompt,
        "image_size": size,
        "strength": order.sample_strength,
        "image_url": images[0] if len(images) == 1 else None,
        "image_urls": images if len(images) > 1 else None,
        "aspect_ratio": order.ratio,
        "duration": None if order.whole_seconds is None else str(order.whole_seconds),
    }
    return {name: value for name, value in inputs.items() if value is not None} | dict(order.extra or {})


def _failure(message: str, error_type: str | None) -> Rejected:
    code = _CODES.get(error_type or "", "provider_failed")
    return Rejected(code, f"fal reports a failure: {message[:500]}", fail_code=error_type)


def _error_in(body: Any) -> tuple[str, str | None]:
    """The message and the type of the error in an answer. fal writes the error as a text or as a list of objects."""
    detail = body.get("detail") if isinstance(body, dict) else None
    first = detail[0] if isinstance(detail, list) and detail else detail
    if isinstance(first, dict):
        error_type = first.get("type")
        return str(first.get("msg") or ""), error_type if isinstance(error_type, str) else None
    return str(first or ""), None


def _body_of(answer: ProviderAnswer) -> Mapping[str, Any]:
    """The body of a successful answer. Raises ProviderError for any other answer."""
    if answer.is_success:
        return as_mapping(answer.body)
    raise answer.refusal(*_error_in(answer.body))
