"""The client of schedules over HTTP: it makes each with a key, then runs it now, backfills it, or deletes it."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import cycle

from chaos.load.diary import Diary, Sender
from chaos.load.errands import ask
from chaos.load.runs import SCOPE
from chaos.pipelines import short

#: A schedule of the load fires on the first of January, so a backfill of the new year has one tick.
_CRON = "0 0 1 1 *"


def keeper(diary: Diary) -> Sender:
    """Makes schedules. The diary has each as a request of the kind `schedule`, and its one run as `scheduled`."""
    actions = cycle(("run-now", "delete", "backfill"))

    async def send(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        action = next(actions)
        made = await client.request("POST", "/v1/schedules", {
            "template": short.name, "cron": _CRON, "payload_template": diary.words(), "scope": SCOPE, "scope_id": key,
            "overlap": "allow_all",
        }, key=key, again=diary.is_sent_twice())  # fmt: skip
        ids = tuple((str(body["id"]),) for body in made.answered)
        diary.record("schedule", tenant, key, made, endpoint="POST /v1/schedules", answers=ids)
        if not ids:
            return
        path = f"/v1/schedules/{ids[-1][0]}"
        if action == "delete":
            await ask(diary, client, tenant, "PATCH", path, {"enabled": False})
            await ask(diary, client, tenant, "DELETE", path)
            return
        backfills = action == "backfill"
        past = datetime.now(UTC).year - 1
        body = {"start": f"{past}-06-01T00:00:00Z", "end": f"{past + 1}-01-02T00:00:00Z"} if backfills else None
        fired = await client.request("POST", f"{path}/{action}", body, key=diary.key(), again=diary.is_sent_twice())
        runs = tuple(tuple(map(str, body.get("runs", [body.get("id")]))) for body in fired.answered)
        diary.record("scheduled", tenant, ids[-1][0], fired, endpoint=f"POST /v1/schedules/{action}", answers=runs)

    return send
