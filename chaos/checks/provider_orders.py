"""Judges I22: a generation is ordered at its provider at most once, and nobody polls the order after its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History

#: A poll of the provider may have been under way when the job ended: it may arrive this much later.
_POLL_SECONDS = 5.0


def i22(history: History) -> Iterator[Observation]:
    """At most one order per generation, one for each that succeeded, and nobody polls once it has ended."""
    orders = Counter(order.key for order in history.orders)
    for generation in history.generations:
        key, job = generation["task_id"], history.job_by_id[generation["job_id"]]
        sentence = f"the generation {key}, which {job['status']}, was ordered {orders[key]} times"
        yield observed(
            "generation", sentence, good=orders[key] <= 1 and (orders[key] == 1 or job["status"] != "succeeded")
        )
    ended = {
        generation["task_id"]: history.ended_at.get(generation["job_id"], float("inf"))
        for generation in history.generations
    }
    for order in history.orders:
        sentence = f"{order.provider} was polled for {order.id} long after the generation {order.key} had ended"
        yield observed("order", sentence, good=order.last_polled_at <= ended.get(order.key, 0.0) + _POLL_SECONDS)
