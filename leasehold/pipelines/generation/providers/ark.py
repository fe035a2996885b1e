"""The provider Volcengine Ark, an outside service. An order for a video starts a task of Ark, whose result is polled.
The answer to an order for images already has the links to the images.

https://www.volcengine.com/docs/82379/1520757 (create a task), 1521309 (query), 1521720 (delete), 1541523 (images). Ark
honours no idempotency token, so a repeated order is a second order. A delete stops a task only while it is queued.
Links to videos expire after 24 hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import orjson

from leasehold.pipelines.generation.provider import Accepted, Finished, Order, Rejected, SourceImage, Working
from leasehold.pipelines.generation.providers.requests import (
    ProviderAnswer,
    RequestSender,
    as_mapping,
    bad_answer,
    no_files,
    text_at,
    urls_in,
)

_TASKS = "/api/v3/contents/generations/tasks"
_IMAGES = "/api/v3/images/generations"
#: The shortest and the longest execution_expires_after that Ark accepts, in seconds.
_SHORTEST_EXPIRY, _LONGEST_EXPIRY = 3600, 259_200
#: The timeout of an order for images. It is long, because Ark answers only when the images are finished.
_IMAGE_SECONDS = 150.0


class Ark:
    """The client of Ark. A credential is an API key. The protocol `Provider` describes the members."""

    name = "ark"
    honours_token = False

    def __init__(self, sender: RequestSender, base_url: str) -> None:
        self._sender = sender
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Accepted | Finished:
        if order.kind == "image":
            answer = await self._send(
                "POST", _IMAGES, credential, _image_request(order), buys=True, seconds=_IMAGE_SECONDS
            )
            urls = urls_in(_body_of(answer).get("data"))
            if not urls:
                raise no_files()
            return Finished(urls)
        answer = await self._send("POST", _TASKS, credential, _video_request(order), buys=True)
        return Accepted(text_at(_body_of(answer), "id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:  # noqa: ARG002 - the id suffices
        task = _body_of(await self._send("GET", f"{_TASKS}/{quote(ref, safe='')}", credential))
        status = text_at(task, "status")
        if status in ("queued", "running"):
            return Working(status)
        if status == "succeeded":
            urls = urls_in(as_mapping(task.get("content")).get("video_url"))
            if not urls:
                raise no_files()
            return Finished(urls)
        if status in ("failed", "cancelled", "expired"):
            error = _error_in(task)
            message = f"Ark reports its task as {status}. {str(error.get('message') or '')[:500]}".strip()
            raise Rejected(_CODES[status], message, fail_code=str(error.get("code") or status)[:100])
        raise bad_answer("has a status that is not documented")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:  # noqa: ARG002 - as above
        answer = await self._send("DELETE", f"{_TASKS}/{quote(ref, safe='')}", credential)
        return answer.stopped()

    async def _send(
        self,
        method: str,
        path: str,
        credential: str,
        body: Mapping[str, Any] | None = None,
        *,
        buys: bool = False,
        seconds: float = 30.0,
    ) -> ProviderAnswer:
        """Send a request. `buys`: the request is an order, which may cost money."""
        return await self._sender.send(
            method,
            self._url + path,
            headers={"authorization": f"Bearer {credential}"},
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
            seconds=seconds,
        )


# The status of an Ark task that has ended without a file -> the platform's error code.
_CODES = {"failed": "provider_failed", "cancelled": "provider_cancelled", "expired": "provider_expired"}


def _required_model(order: Order) -> str:
    if not order.model:
        raise Rejected("model_required", "Ark has no default model: name a model.")
    return order.model


def _video_request(order: Order) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": order.prompt}]
    content += [
        {"type": "image_url", "image_url": {"url": image.url}, "role": role}
        for image, role in zip(order.images, _roles(order.images), strict=True)
    ]
    request: dict[str, Any] = {"model": _required_model(order), "content": content}
    if order.ratio:
        request["ratio"] = order.ratio
    if order.whole_seconds is not None:
        request["duration"] = order.whole_seconds
    if order.deadline_seconds:
        request["execution_expires_after"] = min(max(order.deadline_seconds, _SHORTEST_EXPIRY), _LONGEST_EXPIRY)
    if order.callback:
        request["callback_url"] = order.callback
    return request | dict(order.extra or {})


def _roles(images: tuple[SourceImage, ...]) -> tuple[str, ...]:
    """The role of each picture. Three or more pictures are references. If there are only one or two, the first is the
    first frame of the video, and the second is the last frame.
    """
    if len(images) > 2:  # noqa: PLR2004 - the first and the last frame
        return ("reference_image",) * len(images)
    return ("first_frame", "last_frame")[: len(images)]


def _image_request(order: Order) -> dict[str, Any]:
    request: dict[str, Any] = {"model": _required_model(order), "prompt": order.prompt, "response_format": "url"}
    if order.width and order.height:
        request["size"] = f"{order.width}x{order.height}"
    if order.images:
        request["image"] = [image.url for image in order.images]
    return request | dict(order.extra or {})


def _body_of(answer: ProviderAnswer) -> Mapping[str, Any]:
    """The body of a successful answer. Raises ProviderError for any other answer."""
    if answer.is_success:
        return as_mapping(answer.body)
    error = _error_in(answer.body)
    raise answer.refusal(str(error.get("message") or ""), str(error["code"]) if "code" in error else None)


def _error_in(body: Any) -> Mapping[str, Any]:
    """The error in an answer. Empty if the answer has no error in the documented form."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
