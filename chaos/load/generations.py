"""The client of generations. It cancels some of them while they run."""

from __future__ import annotations

import asyncio
from itertools import count

from chaos.load.diary import Diary, Sender

#: The prompt has the request's key, by which the checker finds the generation in the provider's ledger.
PROMPT = "picture {}"
#: The client cancels one generation of this many.
_CANCELLED = 4


def sender(diary: Diary) -> Sender:
    """Submits generations to a provider that honours tokens, and to one that does not. Neither may sell a picture
    twice.
    """
    numbers = count()

    async def send(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        provider, cancels = diary.rng.choice(("gateway", "jimeng")), next(numbers) % _CANCELLED == 0
        body = {"prompt": f"{PROMPT.format(key)} #work=1", "provider": provider, "task_id": key}
        outcome = await client.request("POST", "/v1/images/generations", body, key=key, again=diary.is_sent_twice())
        jobs = tuple((str(body["data"]["job_id"]),) for body in outcome.answered)
        job = jobs[-1][0] if jobs else ""
        diary.record("generation", tenant, key, outcome, job=job, endpoint="POST /v1/images/generations", answers=jobs)
        if not job or not cancels:
            return
        await asyncio.sleep(diary.rng.uniform(0.0, 1.5))
        outcome = await client.request("POST", "/v1/images/cancel", {"task_id": key})
        # The answer is about the order. Only the job's row shows whether the job is cancelled.
        answer = "stopping" if outcome.good else ""
        diary.record(
            "cancel", tenant, f"cancel {job}", outcome, job=job, endpoint="POST /v1/images/cancel", answer=answer
        )

    return send
