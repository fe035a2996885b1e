"""The provider Jimeng, an outside service that makes images and videos, through Volcengine's visual API. A submit
starts a task of Jimeng, and polls ask for its result. An access key and a secret key sign each request.

https://www.volcengine.com/docs/85621/1820192 and the pages beside it describe CVSync2AsyncSubmitTask and
CVSync2AsyncGetResult. Jimeng honours no idempotency token and cannot stop a task. It keeps tasks for 12 hours. Links
expire after 24 hours (images) or one hour (videos). The code in the body of an answer takes precedence over the HTTP
status. Only the code 10000 means success.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from httpx2 import URL

from leasehold.pipelines.generation.provider import (
    Accepted,
    Finished,
    NoAccess,
    Order,
    OutcomeUnknown,
    Rejected,
    TryLater,
    Working,
)
from leasehold.pipelines.generation.providers.requests import (
    ProviderAnswer,
    RequestSender,
    as_mapping,
    bad_answer,
    no_files,
    text_at,
    urls_in,
)
from leasehold.pipelines.generation.providers.volcengine_signature import canonical_query, signed_headers

_VERSION = "2022-08-31"
_REGION, _SERVICE = "cn-north-1", "cv"
_SUCCESS = 10000
#: Jimeng's codes for too many requests.
_BUSY = frozenset({50429, 50430})
#: Jimeng's codes of its internal errors. If the answer to a submit has such a code, nobody knows whether Jimeng
#: accepted the order. After a poll with such an answer, the platform polls again.
_INTERNAL = frozenset({50500, 50501})
#: A code of Jimeng for a final error -> the platform's error code.
_FINAL = {
    50411: "content_refused", 50412: "content_refused", 50413: "content_refused", 50518: "content_refused",
    50511: "output_refused", 50512: "output_refused", 50519: "output_refused",
}  # fmt: skip
_DEFAULT_MODEL = {"image": "jimeng_t2i_v40", "video": "jimeng_ti2v_v30_pro"}
_FRAMES_A_SECOND = 24


class Jimeng:
    """The client of Jimeng. A credential is `access key:secret key`; a model is a `req_key`."""

    name = "jimeng"
    honours_token = False

    def __init__(self, sender: RequestSender, base_url: str) -> None:
        self._sender = sender
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Accepted:
        # `buys`: the request is an order, which may cost money.
        answer = await self._request("CVSync2AsyncSubmitTask", _request_body(order), credential, buys=True)
        return Accepted(text_at(_data(answer), "task_id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
        query = {"req_key": _model(order), "task_id": ref, "req_json": orjson.dumps({"return_url": True}).decode()}
        data = _data(await self._request("CVSync2AsyncGetResult", query, credential))
        status = text_at(data, "status")
        if status in ("in_queue", "generating", "processing"):
            return Working(status)
        if status == "done":
            urls = urls_in(data.get("image_urls")) or urls_in(data.get("video_url"))
            if not urls:
                raise no_files()
            return Finished(urls)
        if status in ("not_found", "expired"):
            raise Rejected("provider_expired", f"Jimeng reports its task as {status}.", fail_code=status)
        raise bad_answer("has a status that is not documented")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:  # noqa: ARG002 - Jimeng cannot stop a task
        return False

    async def _request(
        self, action: str, body: Mapping[str, Any], credential: str, *, buys: bool = False
    ) -> ProviderAnswer:
        access_key, _, secret_key = credential.partition(":")
        if not access_key or not secret_key:
            raise NoAccess("credential_malformed", "Jimeng's credential is `access key:secret key`.")
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
        return await self._sender.send("POST", url, headers=headers, body=content, buys=buys)


def _model(order: Order) -> object:
    """The model of the order. A poll must name the same model as the submit, so that Jimeng finds the task."""
    return (order.extra or {}).get("req_key", order.model or _DEFAULT_MODEL[order.kind])


def _request_body(order: Order) -> dict[str, Any]:
    """The order in Jimeng's own fields. Values for which Jimeng has no field are left out
    (docs/guides/generation.md).
    """
    request: dict[str, Any] = {"req_key": _model(order), "prompt": order.prompt}
    if order.images:
        request["image_urls"] = [image.url for image in order.images]
    if order.kind == "image":
        if order.width and order.height:
            request |= {"width": order.width, "height": order.height}
        if order.sample_strength is not None:
            request["scale"] = order.sample_strength
    else:
        if order.whole_seconds is not None:
            request["frames"] = _FRAMES_A_SECOND * order.whole_seconds + 1
        if order.ratio:
            request["aspect_ratio"] = order.ratio
    return request | dict(order.extra or {})


def _data(answer: ProviderAnswer) -> Mapping[str, Any]:
    """The data of a successful answer. Raises ProviderError for any other answer. If the body has a known code, this
    code decides which error is raised. Otherwise the HTTP status decides.
    """
    if not isinstance(answer.body, dict):
        if answer.is_success:
            raise bad_answer("is not a JSON object")
        raise answer.refusal()
    code, message = answer.body.get("code"), str(answer.body.get("message") or "")
    if code == _SUCCESS:
        return as_mapping(answer.body.get("data"))
    if not isinstance(code, int):
        raise bad_answer("has no code") if answer.is_success else answer.refusal(message)
    if code in _BUSY:
        raise TryLater("provider_busy", f"Jimeng is busy: {message}", fail_code=str(code), after=answer.after)
    if code in _FINAL:
        raise Rejected(_FINAL[code], f"Jimeng refused: {message}", fail_code=str(code))
    if code in _INTERNAL:
        raise OutcomeUnknown("provider_error", f"Jimeng failed: {message}", fail_code=str(code))
    if not answer.is_success:
        raise answer.refusal(message, str(code))
    raise Rejected("provider_refused", f"Jimeng refused: {message}", fail_code=str(code))
