"""Volcengine Ark: videos as tasks, images at once. https://www.volcengine.com/docs/82379/1520757 (create a task),
1521309 (ask), 1521720 (delete), 1541523 (images).

It takes no idempotency token. Deleting stops a queued task; a running one goes on. Video links live 24 hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import orjson

from leasehold.pipelines.generation.provider import Made, Order, Rejected, SourceImage, Taken, Working
from leasehold.pipelines.generation.providers.asking import (
    Asker,
    Heard,
    as_mapping,
    bad_answer,
    no_files,
    text_at,
    urls_in,
)

_TASKS = "/api/v3/contents/generations/tasks"
_IMAGES = "/api/v3/images/generations"
#: Seconds that the service accepts for execution_expires_after.
_EXPIRES = (3600, 259_200)
#: Images are made while we wait.
_IMAGE_SECONDS = 150.0


class Ark:
    name = "ark"
    takes_token = False

    def __init__(self, asker: Asker, base_url: str) -> None:
        self._asker = asker
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Taken | Made:
        if order.kind == "image":
            heard = await self._ask("POST", _IMAGES, credential, _image(order), buys=True, seconds=_IMAGE_SECONDS)
            urls = urls_in(_good(heard).get("data"))
            if not urls:
                raise no_files()
            return Made(urls)
        heard = await self._ask("POST", _TASKS, credential, _video(order), buys=True)
        return Taken(text_at(_good(heard), "id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:  # noqa: ARG002 - the id says it all
        said = _good(await self._ask("GET", f"{_TASKS}/{quote(ref, safe='')}", credential))
        status = text_at(said, "status")
        if status in ("queued", "running"):
            return Working(status)
        if status == "succeeded":
            urls = urls_in(as_mapping(said.get("content")).get("video_url"))
            if not urls:
                raise no_files()
            return Made(urls)
        if status in ("failed", "cancelled", "expired"):
            error = _error(said)
            told = f"Ark says of its task: {status}. {str(error.get('message') or '')[:500]}".strip()
            raise Rejected(_WORDS[status], told, fail_code=str(error.get("code") or status)[:100])
        raise bad_answer("has a status that is not documented")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:  # noqa: ARG002 - as above
        heard = await self._ask("DELETE", f"{_TASKS}/{quote(ref, safe='')}", credential)
        return heard.stopped()

    async def _ask(
        self,
        method: str,
        path: str,
        credential: str,
        body: Mapping[str, Any] | None = None,
        *,
        buys: bool = False,
        seconds: float = 30.0,
    ) -> Heard:
        return await self._asker.ask(
            method,
            self._url + path,
            headers={"authorization": f"Bearer {credential}"},
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
            seconds=seconds,
        )


_WORDS = {"failed": "provider_failed", "cancelled": "provider_cancelled", "expired": "provider_expired"}


def _model(order: Order) -> str:
    if not order.model:
        raise Rejected("model_required", "Ark has no model of its own choice: name one.")
    return order.model


def _video(order: Order) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": order.prompt}]
    content += [
        {"type": "image_url", "image_url": {"url": image.url}, "role": role}
        for image, role in zip(order.images, _roles(order.images), strict=True)
    ]
    said: dict[str, Any] = {"model": _model(order), "content": content}
    if order.ratio:
        said["ratio"] = order.ratio
    if order.duration_ms:
        said["duration"] = round(order.duration_ms / 1000)
    if order.deadline_seconds:
        said["execution_expires_after"] = min(max(order.deadline_seconds, _EXPIRES[0]), _EXPIRES[1])
    if order.callback:
        said["callback_url"] = order.callback
    return said | dict(order.extra or {})


def _roles(images: tuple[SourceImage, ...]) -> tuple[str, ...]:
    """One picture begins the video, a second one ends it; more are references."""
    if len(images) > 2:  # noqa: PLR2004 - as said
        return ("reference_image",) * len(images)
    return ("first_frame", "last_frame")[: len(images)]


def _image(order: Order) -> dict[str, Any]:
    said: dict[str, Any] = {"model": _model(order), "prompt": order.prompt, "response_format": "url"}
    if order.width and order.height:
        said["size"] = f"{order.width}x{order.height}"
    if order.images:
        said["image"] = [image.url for image in order.images]
    return said | dict(order.extra or {})


def _good(heard: Heard) -> Mapping[str, Any]:
    if heard.good:
        return as_mapping(heard.said)
    error = _error(heard.said)
    raise heard.refusal(str(error.get("message") or ""), str(error["code"]) if "code" in error else None)


def _error(said: Any) -> Mapping[str, Any]:
    """What an answer says went wrong, if it says so in the documented form."""
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else {}
