"""Replicate: predictions. https://replicate.com/docs/reference/http, and for Cancel-After
https://replicate.com/changelog/2025-10-16-prediction-deadlines ; webhooks:
https://replicate.com/docs/topics/webhooks/setup-webhook (https alone).

It takes no idempotency token. Links live an hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import orjson

from leasehold.pipelines.generation.provider import Made, Order, Rejected, Taken, Working
from leasehold.pipelines.generation.providers.asking import (
    Asker,
    Heard,
    as_mapping,
    bad_answer,
    no_files,
    text_at,
    urls_in,
)

#: The least that Cancel-After may say, in seconds.
_LEAST_DEADLINE = 5
_WORDS = {"failed": "provider_failed", "canceled": "provider_cancelled", "aborted": "provider_expired"}


class Replicate:
    """The model is `owner/name`, or the id of a version."""

    name = "replicate"
    takes_token = False

    def __init__(self, asker: Asker, base_url: str) -> None:
        self._asker = asker
        self._url = base_url.rstrip("/")

    async def submit(self, order: Order, credential: str) -> Taken:
        path, body = _prediction(order)
        headers = {}
        if order.deadline_seconds:
            headers["cancel-after"] = f"{max(order.deadline_seconds, _LEAST_DEADLINE)}s"
        heard = await self._ask("POST", path, credential, body, headers, buys=True)
        return Taken(text_at(_good(heard), "id"))

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:  # noqa: ARG002 - the id says it all
        said = _good(await self._ask("GET", f"/v1/predictions/{quote(ref, safe='')}", credential))
        status = text_at(said, "status")
        if status in ("starting", "processing"):
            return Working(status)
        if status == "succeeded":
            urls = urls_in(said.get("output"))
            if not urls:
                raise no_files()
            return Made(urls)
        if status in _WORDS:
            told = f"Replicate says of its prediction: {status}. {str(said.get('error') or '')[:500]}".strip()
            raise Rejected(_WORDS[status], told, fail_code=status)
        raise bad_answer("has a status that is not documented")

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:  # noqa: ARG002 - as above
        heard = await self._ask("POST", f"/v1/predictions/{quote(ref, safe='')}/cancel", credential)
        return heard.stopped()

    async def _ask(
        self,
        method: str,
        path: str,
        credential: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        buys: bool = False,
    ) -> Heard:
        return await self._asker.ask(
            method,
            self._url + path,
            headers={"authorization": f"Bearer {credential}", **(headers or {})},
            body=b"" if body is None else orjson.dumps(body),
            buys=buys,
        )


def _prediction(order: Order) -> tuple[str, dict[str, Any]]:
    if not order.model:
        raise Rejected("model_required", "Replicate has no model of its own choice: name one.")
    given: dict[str, Any] = {
        "prompt": order.prompt,
        "negative_prompt": order.negative_prompt,
        "width": order.width,
        "height": order.height,
        "prompt_strength": order.sample_strength,
        "image": order.images[0].url if order.images else None,
        "aspect_ratio": order.ratio,
        "duration": round(order.duration_ms / 1000) if order.duration_ms else None,
    }
    said: dict[str, Any] = {
        "input": {name: value for name, value in given.items() if value is not None} | dict(order.extra or {})
    }
    if order.callback and order.callback.startswith("https://"):
        said |= {"webhook": order.callback, "webhook_events_filter": ["completed"]}
    owner, slash, name = order.model.partition("/")
    if slash and ":" not in name:
        return f"/v1/models/{quote(owner, safe='')}/{quote(name, safe='')}/predictions", said
    return "/v1/predictions", said | {"version": order.model.rpartition(":")[2]}


def _good(heard: Heard) -> Mapping[str, Any]:
    if heard.good:
        return as_mapping(heard.said)
    said = heard.said if isinstance(heard.said, dict) else {}
    raise heard.refusal(str(said.get("detail") or said.get("title") or ""))
