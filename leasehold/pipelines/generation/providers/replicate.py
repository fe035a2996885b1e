"""The provider Replicate, an outside service that makes images and videos. Replicate calls an order a prediction. It
honours no idempotency token. Its links to files expire after an hour.

- The API: https://replicate.com/docs/reference/http
- The header Cancel-After: https://replicate.com/changelog/2025-10-16-prediction-deadlines
- Webhooks, which must have https: https://replicate.com/docs/topics/webhooks/setup-webhook
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

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

#: The shortest Cancel-After that Replicate accepts, in seconds.
_MIN_CANCEL_AFTER = 5
#: A status of Replicate that ends a prediction without a file -> the platform's error code.
_CODES = {"failed": "provider_failed", "canceled": "provider_cancelled", "aborted": "provider_expired"}


class Replicate:
    """The client of Replicate. A model is `owner/name`, or the id of a version. `Provider` describes the members."""

    name = "replicate"
    honours_token = False

    def __init__(self, sender: RequestSender, base_url: str) -> None:
        self._sender = sender
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Accepted:
        path, body = _prediction(order)
        headers = {}
        if order.deadline_seconds:
            headers["cancel-after"] = f"{max(order.deadline_seconds, _MIN_CANCEL_AFTER)}s"
        answer = await self._send("POST", path, credential, body, headers, buys=True)
        return Accepted(text_at(_body_of(answer), "id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:  # noqa: ARG002 - the id suffices
        prediction = _body_of(await self._send("GET", f"/v1/predictions/{quote(ref, safe='')}", credential))
        status = text_at(prediction, "status")
        if status in ("starting", "processing"):
            return Working(status)
        if status == "succeeded":
            urls = urls_in(prediction.get("output"))
            if not urls:
                raise no_files()
            return Finished(urls)
        if status in _CODES:
            message = (
                f"Replicate reports its prediction as {status}. {str(prediction.get('error') or '')[:500]}".strip()
            )
            raise Rejected(_CODES[status], message, fail_code=status)
        raise bad_answer("has a status that is not documented")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:  # noqa: ARG002 - as above
        answer = await self._send("POST", f"/v1/predictions/{quote(ref, safe='')}/cancel", credential)
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
        """Send a request. `buys`: the request is an order, which may cost money."""
        return await self._sender.send(
            method,
            self._url + path,
            headers={"authorization": f"Bearer {credential}", **(headers or {})},
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
        )


def _prediction(order: Order) -> tuple[str, dict[str, Any]]:
    """The path and the body of the request that creates a prediction."""
    if not order.model:
        raise Rejected("model_required", "Replicate has no default model: name a model.")
    inputs: dict[str, Any] = {
        "prompt": order.prompt,
        "negative_prompt": order.negative_prompt,
        "width": order.width,
        "height": order.height,
        "prompt_strength": order.sample_strength,
        "image": order.images[0].url if order.images else None,
        "aspect_ratio": order.ratio,
        "duration": order.whole_seconds,
    }
    request: dict[str, Any] = {
        "input": {name: value for name, value in inputs.items() if value is not None} | dict(order.extra or {})
    }
    if order.callback and order.callback.startswith("https://"):
        request |= {"webhook": order.callback, "webhook_events_filter": ["completed"]}
    # A model `owner/name` has an endpoint of its own. A version (`owner/name:version`, or its id alone) goes into the
    # body.
    owner, slash, name = order.model.partition("/")
    if slash and ":" not in name:
        # A part that is empty, `.` or `..` would change the URL's path.
        if "/" in name or not owner.strip(".") or not name.strip("."):
            raise Rejected("model_required", "A model of Replicate is `owner/name`, or the id of a version.")
        return f"/v1/models/{quote(owner, safe='')}/{quote(name, safe='')}/predictions", request
    return "/v1/predictions", request | {"version": order.model.rpartition(":")[2]}


def _body_of(answer: ProviderAnswer) -> Mapping[str, Any]:
    """The body of a successful answer. Raises ProviderError for any other answer."""
    if answer.is_success:
        return as_mapping(answer.body)
    error = answer.body if isinstance(answer.body, dict) else {}
    raise answer.refusal(str(error.get("detail") or error.get("title") or ""))
