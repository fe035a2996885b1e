"""Jimeng by its official door, Volcengine's visual API: asynchronous tasks, signed with an access key pair.

https://www.volcengine.com/docs/85621/1820192 and its neighbours: CVSync2AsyncSubmitTask, CVSync2AsyncGetResult.
It takes no idempotency token and cannot be told to stop. Tasks are kept for 12 hours; links live 24 hours (images)
or one (videos). The code in the answer counts before its status: only 10000 is good.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from httpx2 import URL

from leasehold.pipelines.generation.provider import Made, Order, OutcomeUnknown, Rejected, Taken, TryLater, Working
from leasehold.pipelines.generation.providers.asking import (
    Asker,
    Heard,
    as_mapping,
    bad_answer,
    no_files,
    text_at,
    urls_in,
)
from leasehold.pipelines.generation.providers.volcengine_signature import canonical_query, signed_headers

_VERSION = "2022-08-31"
_REGION, _SERVICE = "cn-north-1", "cv"
_GOOD = 10000
_BUSY = frozenset({50429, 50430})
#: Its own trouble: after a submit nobody knows what came of it, and a poll is asked again.
_INTERNAL = frozenset({50500, 50501})
#: Our words for the codes that are final.
_FINAL = {
    50411: "content_refused", 50412: "content_refused", 50413: "content_refused", 50518: "content_refused",
    50511: "output_refused", 50512: "output_refused", 50519: "output_refused",
}  # fmt: skip
_DEFAULT_MODEL = {"image": "jimeng_t2i_v40", "video": "jimeng_ti2v_v30_pro"}
_FRAMES_A_SECOND = 24


class Jimeng:
    """The credential is `access key:secret key`; the model is a `req_key`."""

    name = "jimeng"
    takes_token = False

    def __init__(self, asker: Asker, base_url: str) -> None:
        self._asker = asker
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Taken:
        heard = await self._act("CVSync2AsyncSubmitTask", _body(order), credential, buys=True)
        return Taken(text_at(_data(heard), "task_id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:
        asked = {"req_key": _model(order), "task_id": ref, "req_json": orjson.dumps({"return_url": True}).decode()}
        data = _data(await self._act("CVSync2AsyncGetResult", asked, credential))
        status = text_at(data, "status")
        if status in ("in_queue", "generating", "processing"):
            return Working(status)
        if status == "done":
            urls = urls_in(data.get("image_urls")) or urls_in(data.get("video_url"))
            if not urls:
                raise no_files()
            return Made(urls)
        if status in ("not_found", "expired"):
            raise Rejected("provider_expired", f"The provider says of its task: {status}.", fail_code=status)
        raise bad_answer("has a status that is not documented")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:  # noqa: ARG002 - it has no such request
        return False

    async def _act(self, action: str, body: Mapping[str, Any], credential: str, *, buys: bool = False) -> Heard:
        access_key, _, secret_key = credential.partition(":")
        if not access_key or not secret_key:
            raise Rejected("credential_malformed", "Jimeng's credential is `access key:secret key`.")
        content = orjson.dumps(body)
        query = {"Action": action, "Version": _VERSION}
        headers = signed_headers(
            access_key,
            secret_key,
            host=URL(self._url).netloc.decode(),
            query=query,
            body=content,
            region=_REGION,
            service=_SERVICE,
            now=datetime.now(UTC),
        )
        url = f"{self._url}/?{canonical_query(query)}"
        return await self._asker.ask("POST", url, headers=headers, body=content, buys=buys)


def _model(order: Order) -> str:
    return order.model or _DEFAULT_MODEL[order.kind]


def _body(order: Order) -> dict[str, Any]:
    """By the service's own names; what it has no name for is left out (docs/guides/generation.md)."""
    said: dict[str, Any] = {"req_key": _model(order), "prompt": order.prompt}
    if order.images:
        said["image_urls"] = [image.url for image in order.images]
    if order.kind == "image":
        if order.width and order.height:
            said |= {"width": order.width, "height": order.height}
        if order.sample_strength is not None:
            said["scale"] = order.sample_strength
    else:
        if order.duration_ms:
            said["frames"] = _FRAMES_A_SECOND * round(order.duration_ms / 1000) + 1
        if order.ratio:
            said["aspect_ratio"] = order.ratio
    return said | dict(order.extra or {})


def _data(heard: Heard) -> Mapping[str, Any]:
    """Raises by the answer's own code first, then by the HTTP status."""
    if not isinstance(heard.said, dict):
        if heard.good:
            raise bad_answer("is no JSON object")
        raise heard.refusal()
    code, message = heard.said.get("code"), str(heard.said.get("message") or "")
    if code == _GOOD:
        return as_mapping(heard.said.get("data"))
    if not isinstance(code, int):
        raise bad_answer("has no code") if heard.good else heard.refusal(message)
    if code in _BUSY:
        raise TryLater("provider_busy", f"Jimeng is busy: {message}", fail_code=str(code), after=heard.after)
    if code in _FINAL:
        raise Rejected(_FINAL[code], f"Jimeng refused: {message}", fail_code=str(code))
    if code in _INTERNAL:
        raise OutcomeUnknown("provider_error", f"Jimeng failed: {message}", fail_code=str(code))
    if not heard.good:
        raise heard.refusal(message, str(code))
    raise Rejected("provider_refused", f"Jimeng refused: {message}", fail_code=str(code))
