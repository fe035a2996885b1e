"""Each provider's own words, as documented (the addresses are in leasehold/pipelines/generation/providers)."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any
from urllib.parse import quote

import orjson

from tests.generation.simulator.http import Reply, Request
from tests.generation.simulator.work import Bought, Studio

ACCESS_KEY, SECRET_KEY, BEARER = "AKLTexample", "c2VjcmV0LWtleQ==", "r8_token-of-the-tests"
VOLCENGINE = f"{ACCESS_KEY}:{SECRET_KEY}"


async def jimeng(studio: Studio, request: Request) -> Reply:
    """Volcengine visual: everything is a POST to /, told apart by Action."""
    if request.query.get("Version") != "2022-08-31" or not _is_signed(request):
        return Reply(401, {"code": 50400, "message": "SignatureDoesNotMatch", "request_id": "x", "data": None})
    asked = request.json
    if request.query["Action"] == "CVSync2AsyncSubmitTask":
        return await _jimeng_submit(studio, asked)
    if not isinstance(asked.get("req_json"), str) or not asked.get("req_key"):
        return _visual(50200, "invalid parameter", status=400)
    bought = studio.find(asked["task_id"])
    if bought is None:
        return _visual(10000, "Success", data={"status": "not_found"})
    return studio.poll(bought) or _jimeng_state(studio, bought)


async def _jimeng_submit(studio: Studio, asked: dict[str, Any]) -> Reply:
    if not asked.get("req_key") or not asked.get("prompt"):
        return _visual(50200, "invalid parameter", status=400)
    if "#refused" in asked["prompt"]:
        return _visual(50411, "Pre Img Risk Not Pass", status=400)
    bought = await studio.buy("video" if "v30" in asked["req_key"] else "image", asked["prompt"])
    if isinstance(bought, Reply):
        return _visual(50430, "Request Has Reached API Concurrent Limit", 429) if bought.status == 429 else bought
    return _visual(10000, "Success", data={"task_id": bought.id})


def _jimeng_state(studio: Studio, bought: Bought) -> Reply:
    match bought.state:
        case "working" if not bought.script.has("odd"):
            return _visual(10000, "Success", data={"status": "generating"})
        case "made":
            links = studio.links(bought)
            done: dict[str, Any] = {"status": "done", "image_urls": links} if bought.kind == "image" else {
                "status": "done", "video_url": links[0] if links else "",
            }  # fmt: skip
            return _visual(10000, "Success", data=done)
        case "failed":
            return _visual(bought.script.number("fail", 50511), "Post Img Risk Not Pass", status=400)
    return _visual(10000, "Success", data={"status": "dreaming"})


def _visual(code: int, message: str, status: int = 200, data: Any = None) -> Reply:
    return Reply(status, {"code": code, "data": data, "message": message, "request_id": "2026", "time_elapsed": "1ms"})


def _is_signed(request: Request) -> bool:
    """By the documented algorithm, from what arrived."""
    said = request.headers.get("authorization", "")
    parts = dict(part.strip().split("=", 1) for part in said.removeprefix("HMAC-SHA256 ").split(","))
    access_key, _, scope = parts["Credential"].partition("/")
    if access_key != ACCESS_KEY or hashlib.sha256(request.body).hexdigest() != request.headers["x-content-sha256"]:
        return False
    names = parts["SignedHeaders"].split(";")
    if not {"host", "x-date", "x-content-sha256"} <= set(names):
        return False
    query = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(request.query.items())
    )
    lines = [request.method, request.path, query, *(f"{name}:{request.headers[name]}" for name in names), ""]
    canonical = "\n".join([*lines, parts["SignedHeaders"], request.headers["x-content-sha256"]])
    to_sign = f"HMAC-SHA256\n{request.headers['x-date']}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = SECRET_KEY.encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return hmac.compare_digest(hmac.new(key, to_sign.encode(), "sha256").hexdigest(), parts["Signature"])


async def ark(studio: Studio, request: Request) -> Reply:
    if request.headers.get("authorization") != f"Bearer {BEARER}":
        return Reply(401, {"error": {"code": "AuthenticationError", "message": "the API key is not valid"}})
    if request.method == "POST":
        order = _ark_image if request.path == "/api/v3/images/generations" else _ark_task
        return await order(studio, request.json)
    bought = studio.find(request.path.rpartition("/")[2])
    if bought is None:
        return Reply(404, {"error": {"code": "ResourceNotFound", "message": "no such task"}})
    if request.method == "DELETE":
        if bought.polls:
            return Reply(409, {"error": {"code": "InvalidAction.RunningTaskDeletion", "message": "it is running"}})
        studio.cancel(bought)
        return Reply(200, {})
    return studio.poll(bought) or Reply(said=_ark_state(studio, bought))


async def _ark_image(studio: Studio, asked: dict[str, Any]) -> Reply:
    if not asked.get("model") or not asked.get("prompt"):
        return Reply(400, {"error": {"code": "MissingParameter", "message": "model and prompt are required"}})
    bought = await studio.buy("image", asked["prompt"])
    if isinstance(bought, Reply):
        return bought
    return Reply(said={"model": asked["model"], "created": 1, "data": [{"url": url} for url in studio.links(bought)]})


async def _ark_task(studio: Studio, asked: dict[str, Any]) -> Reply:
    texts = [part["text"] for part in asked.get("content", []) if part.get("type") == "text"]
    if not asked.get("model") or not texts:
        return Reply(400, {"error": {"code": "MissingParameter", "message": "model and content are required"}})
    if not 3600 <= asked.get("execution_expires_after", 3600) <= 259_200:
        return Reply(400, {"error": {"code": "InvalidParameter", "message": "execution_expires_after"}})
    bought = await studio.buy("video", texts[0])
    if isinstance(bought, Reply):
        return bought
    studio.will_tell(bought, asked.get("callback_url"), lambda: _ark_state(studio, bought))
    return Reply(said={"id": bought.id})


def _ark_state(studio: Studio, bought: Bought) -> dict[str, Any]:
    words = {"working": "running", "made": "succeeded", "failed": "failed", "cancelled": "cancelled"}
    said: dict[str, Any] = {"id": bought.id, "model": "m", "status": words[bought.state]}
    if bought.state == "working" and bought.script.has("odd"):
        said["status"] = "dreaming"
    if bought.state == "made":
        links = studio.links(bought)
        said["content"] = {"video_url": links[0]} if links else {}
    if bought.state == "failed":
        said["error"] = {"code": bought.script.text("fail"), "message": "the output is sensitive"}
    return said


async def replicate(studio: Studio, request: Request) -> Reply:
    if request.headers.get("authorization") != f"Bearer {BEARER}":
        return Reply(401, {"title": "Unauthenticated", "detail": "You did not pass a valid token", "status": 401})
    if request.path.endswith("/predictions") and request.method == "POST":
        return await _predict(studio, request)
    ref = request.path.removesuffix("/cancel").rpartition("/")[2]
    found = studio.find(ref)
    if found is None:
        return Reply(404, {"detail": "not found", "status": 404})
    if request.path.endswith("/cancel"):
        studio.cancel(found)
        return Reply(said={"id": ref, "status": "canceled"})
    return studio.poll(found) or Reply(said=_prediction(studio, found))


async def _predict(studio: Studio, request: Request) -> Reply:
    asked = request.json
    if not isinstance(asked.get("input"), dict) or ("/models/" not in request.path and "version" not in asked):
        return Reply(422, {"title": "Input validation failed", "detail": "input and version are required"})
    if not asked.get("webhook", "https://").startswith("https://"):
        return Reply(422, {"title": "Input validation failed", "detail": "webhook: must be https"})
    bought = await studio.buy("image", asked["input"]["prompt"])
    return bought if isinstance(bought, Reply) else Reply(201, {"id": bought.id, "status": "starting"})


def _prediction(studio: Studio, bought: Bought) -> dict[str, Any]:
    words = {"working": "processing", "made": "succeeded", "failed": "failed", "cancelled": "canceled"}
    said: dict[str, Any] = {"id": bought.id, "status": words[bought.state], "output": None, "error": None}
    if bought.state == "working" and bought.script.has("odd"):
        said["status"] = "dreaming"
    if bought.state == "made":
        links = studio.links(bought)
        said["output"] = links[0] if len(links) == 1 else links
    if bought.state == "failed":
        said["error"] = f"NSFW content detected ({bought.script.text('fail')})"
    return said


async def fal(studio: Studio, request: Request) -> Reply:
    """The queue: a POST to a model's id orders, and owner and app with the request's id ask for it."""
    if request.headers.get("authorization") != f"Key {BEARER}":
        return Reply(401, {"detail": "No user found for Key ID and Secret"})
    _, _, *parts = request.path.split("/")
    if request.method == "POST":
        return await _fal_submit(studio, request)
    found = studio.find(parts[3]) if parts[2:3] == ["requests"] and len(parts) in (4, 5) else None
    if found is None:
        return Reply(404, {"detail": "Request not found"})
    match request.method, parts[4:]:
        case "PUT", ["cancel"]:
            return _fal_cancel(studio, found)
        case "GET", ["status"]:
            return studio.poll(found) or _fal_status(found)
    return _fal_result(studio, found)


def _fal_cancel(studio: Studio, bought: Bought) -> Reply:
    if bought.state != "working":
        return Reply(400, {"status": "ALREADY_COMPLETED"})
    studio.cancel(bought)
    return Reply(202, {"status": "CANCELLATION_REQUESTED"})


async def _fal_submit(studio: Studio, request: Request) -> Reply:
    asked = request.json
    if not asked.get("prompt"):
        return Reply(422, {"detail": [{"loc": ["body", "prompt"], "msg": "Field required", "type": "missing"}]})
    bought = await studio.buy("image", asked["prompt"])
    return bought if isinstance(bought, Reply) else Reply(said={"request_id": bought.id, "status": "IN_QUEUE"})


def _fal_status(bought: Bought) -> Reply:
    if bought.state == "working":
        words = "DREAMING" if bought.script.has("odd") else "IN_PROGRESS"
        return Reply(202, {"request_id": bought.id, "status": words})
    said: dict[str, Any] = {"request_id": bought.id, "status": "COMPLETED", "metrics": {"inference_time": 0.1}}
    if bought.state == "failed" and bought.script.text("fail") == "runner_disconnected":
        said |= {"error": "Runner disconnected", "error_type": "runner_disconnected"}
    return Reply(said=said)


def _fal_result(studio: Studio, bought: Bought) -> Reply:
    """What the model returned, and its status."""
    if bought.state == "failed":
        kind = bought.script.text("fail")
        return Reply(422, {"detail": [{"loc": ["body", "prompt"], "msg": "The content was flagged", "type": kind}]})
    if bought.script.has("withheld") and bought.is_withheld:
        bought.is_withheld = False
        return Reply(bought.script.number("withheld"), {"detail": "not now"})
    files = [{"url": url, "content_type": "image/png"} for url in studio.links(bought)]
    return Reply(said={"images": files, "seed": 7, "prompt": f"https://prompt.example/{bought.prompt}"})


def _gateway_cancel(studio: Studio, bought: Bought) -> Reply:
    if bought.script.has("wait"):
        return Reply(429, {"message": "not now"}, headers={"retry-after": bought.script.text("wait")})
    studio.cancel(bought)
    return Reply(said={})


async def gateway(studio: Studio, request: Request) -> Reply:
    """A provider that promises idempotency, for the declared one; GATEWAY is its declaration."""
    if request.headers.get("x-key") != BEARER:
        return Reply(401, {"message": "no"})
    if request.method == "POST":
        return await _gateway_order(studio, request)
    found = studio.find(request.path.rpartition("/")[2])
    if found is None:
        return Reply(404, {"message": "no such task"})
    if request.method == "DELETE":
        return _gateway_cancel(studio, found)
    if wrong := studio.poll(found):
        return wrong
    state = "dreaming" if found.state == "working" and found.script.has("odd") else found.state
    return Reply(said={
        "data": {"state": state, "urls": ",".join(studio.links(found)) if state == "made" else ""},
        "message": "the model broke", "code": found.script.text("fail") or None,
    })  # fmt: skip


async def _gateway_order(studio: Studio, request: Request) -> Reply:
    asked = request.json
    bought = await studio.buy(asked["kind"], asked["prompt"], request.headers.get("idempotency-key"))
    if isinstance(bought, Reply):
        return bought
    studio.will_tell(bought, asked.get("tell"), dict)
    return Reply(said={"data": {"task": bought.id}})


def gateway_declaration(url: str) -> str:
    """What LEASEHOLD_GENERATION_HTTP_PROVIDERS says of it."""
    headers = {"x-key": "{credential}"}
    one = f"{url}/gateway/tasks/{{ref}}"
    return orjson.dumps([
        {
            "name": "gateway",
            "submit": {"url": f"{url}/gateway/tasks", "headers": headers,
                       "body": {"prompt": "{prompt}", "kind": "{kind}", "size": {"w": "{width}", "h": "{height}"},
                                "tell": "{callback}"}},
            "ref": "/data/task",
            "poll": {"method": "GET", "url": one, "headers": headers},
            "status": "/data/state",
            "statuses": {"working": "working", "made": "made", "failed": "failed", "cancelled": "failed"},
            "urls": "/data/urls", "separator": ",", "error": "/message", "fail_code": "/code",
            "cancel": {"method": "DELETE", "url": one, "headers": headers},
            "token_header": "idempotency-key",
        }
    ]).decode()  # fmt: skip
