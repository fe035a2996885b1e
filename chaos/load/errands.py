"""Errands of operators and owners: they set and lift limits, and change webhooks, templates and queues."""

from __future__ import annotations

import time
from itertools import cycle

from chaos.evidence import Bound
from chaos.load.client import Body, Client, Outcome
from chaos.load.diary import Diary, Sender
from chaos.pipelines import gated, paced, short
from chaos.settings import TENANTS

#: How many runs of `gated` a tenant may have unfinished at once, and how many of `paced` may begin a minute.
AT_MOST, PER_MINUTE = 2, 4


async def declare_limits(diary: Diary) -> None:
    """Set the limits of `gated` and `paced`. Call this before the first run of them."""
    for tenant in TENANTS:
        for key, bound in ((f"template:{gated.name}", {"at_most": AT_MOST}), (_pace(), {"per_minute": PER_MINUTE})):
            asked_at = time.time()
            outcome = await diary.client(tenant).request("PUT", "/v1/limits", {"tenant_id": tenant, "key": key} | bound)
            if outcome.good:
                diary.bounds.append(Bound(tenant, key, bound.get("at_most"), bound.get("per_minute"), asked_at))
                diary.record("limit", tenant, f"{key} of {tenant}", outcome, endpoint="PUT /v1/limits")


async def lift_pace(diary: Diary) -> None:
    """Lift the limit of `paced`, so that waiting runs begin immediately: a chaos run does not wait a minute."""
    for bound in [bound for bound in diary.bounds if bound.key == _pace()]:
        client, path = diary.client(bound.tenant), f"/v1/limits/{bound.tenant}/{bound.key}"
        bound.until = time.time()
        outcome = await client.request("DELETE", path)
        diary.record(
            "limit", bound.tenant, f"lift {path}", outcome, endpoint="DELETE /v1/limits", answer=_of_deletion(outcome)
        )


def _of_deletion(outcome: Outcome) -> str:
    """The value of `Request.answer`. A repeated deletion is answered 404 if an earlier try did it and its answer was
    lost.
    """
    is_done_earlier = outcome.is_gone and outcome.tries > 1
    return "accepted" if is_done_earlier else ""


async def ask(
    diary: Diary, client: Client, tenant: str, method: str, path: str, body: Body | None = None, *, key: str = ""
) -> Outcome:
    """Send a request that makes no job and that no state of the installation makes wrong, and record its answer: a
    refusal makes the run red.
    """
    outcome = await client.request(method, path, body, key=key)
    endpoint = f"{method} {path}"
    answer = _of_deletion(outcome) if method == "DELETE" else ""
    diary.record("errand", tenant, f"{endpoint} {diary.key()}", outcome, endpoint=endpoint, answer=answer)
    return outcome


def _pace() -> str:
    return f"template:{paced.name}"


def runner(diary: Diary) -> Sender:
    """Runs one errand after another. None of them changes anything that another client needs."""
    errands = cycle((_limit, _webhook, _template, _queue))

    async def send(tenant: str) -> None:
        await next(errands)(diary, tenant)

    return send


async def _limit(diary: Diary, tenant: str) -> None:
    client, key = diary.client(tenant), f"payload:{short.name}:/{diary.key()}"
    body = {"tenant_id": tenant, "key": key, "at_most": 1000}
    if (await ask(diary, client, tenant, "PUT", "/v1/limits", body)).good:
        await ask(diary, client, tenant, "DELETE", f"/v1/limits/{tenant}/{key}")


async def _webhook(diary: Diary, tenant: str) -> None:
    """Make, change and delete a webhook. Its event never happens in a run, because the checker expects only the
    messages of the run's own webhook.
    """
    client, key = diary.client(tenant), diary.key()
    body = {"url": f"http://127.0.0.1:{diary.installation.receiver.port}/{tenant}", "events": ["run.expired"]}
    made = await client.request("POST", "/v1/webhooks", body, key=key, again=diary.is_sent_twice())
    ids = tuple((str(body["id"]),) for body in made.answered)
    diary.record("webhook", tenant, key, made, endpoint="POST /v1/webhooks", answers=ids)
    if not ids:
        return
    path = f"/v1/webhooks/{ids[-1][0]}"
    await ask(diary, client, tenant, "PATCH", path, {"enabled": False})
    await ask(diary, client, tenant, "POST", f"{path}/rotate", key=diary.key())
    await ask(diary, client, tenant, "DELETE", path)


async def _template(diary: Diary, tenant: str) -> None:
    client, key = diary.client(tenant), diary.key()
    name = f"t{key}"
    steps = [{"id": "first", "worker_type": "short.first", "queue": "chaos"}]
    made = await client.request(
        "POST", "/v1/templates", {"type": name, "steps": steps}, key=key, again=diary.is_sent_twice()
    )
    answers = tuple((str(body["type"]),) for body in made.answered)
    diary.record("template", tenant, key, made, endpoint="POST /v1/templates", answers=answers)
    if made.good:
        await ask(diary, client, tenant, "PATCH", f"/v1/templates/{name}/1", {"enabled": False})


async def _queue(diary: Diary, tenant: str) -> None:
    client = diary.client(tenant)
    await ask(diary, client, tenant, "POST", "/v1/queues/chaos-idle/pause", {"reason": "chaos"})
    await ask(diary, client, tenant, "POST", "/v1/queues/chaos-idle/resume")
