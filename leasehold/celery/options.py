"""Reads the options of Celery's `@app.task(...)`. An option has Celery's meaning, or changes nothing (IGNORED), or
raises NotSupported, whose message says what to do instead (REFUSED).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from leasehold.app.retry import MAX_TIMES
from leasehold.app.run_limits import Limit
from leasehold.celery.exceptions import NotSupported

#: Options of Celery that change nothing here, and why.
IGNORED = {
    "acks_late": "a run is always acknowledged after its commit",
    "reject_on_worker_lost": "another worker always runs the task of a lost worker",
    "acks_on_failure_or_timeout": "a failed run stays in the database: no message waits for its acknowledgement",
    "ignore_result": "a result is always stored with its run, and deleted with it",
    "store_errors_even_if_ignored": "errors are always kept",
    "track_started": "the run's status always shows it",
    "send_events": "events are always kept",
}
#: Options and settings that leasehold.celery does not have, and what to do instead.
REFUSED = {
    "base": "write a function, and open clients in the app's lifespan",
    "soft_time_limit": "use time_limit, and Leasehold's current().checkpoint()",
    "serializer": "arguments and results are JSON: pass ids or pydantic models in place of pickled objects",
    "compression": "results above 64 KiB go to the object store by themselves",
    "throws": "catch the exception in the task",
    "pydantic": "declare the task with leasehold.App: its arguments are checked by their types",
    "retry_kwargs": "pass max_retries and default_retry_delay",
    "dont_autoretry_for": "list in autoretry_for only the exceptions to retry",
    "typing": "arguments are always checked against the signature",
    "link": "use chain(...), or on_failure= of a leasehold task",
    "link_error": "use on_failure= of a leasehold task",
    "exchange": "use queue=...",
    "routing_key": "use queue=...",
    "headers": "use tags of leasehold's submit",
    "shadow": "use name=...",
    "beat_schedule": "declare the task with leasehold's @app.cron",
    "task_routes": "name the queue in each task: @app.task(queue=...)",
    "task_annotations": "pass the option to each task",
    "task_always_eager": "use leasehold's pytest plugin, or task.local(...)",
    "include": "import the modules, or call autodiscover_tasks([...])",
}
#: Settings of Celery that are accepted and not read. Either a LEASEHOLD_* variable replaces the setting, or Leasehold
#: always works as if the setting were on.
SETTINGS = {
    "broker_url", "broker", "result_backend", "backend", "timezone", "enable_utc", "result_expires",
    "broker_connection_retry_on_startup", "worker_prefetch_multiplier", "worker_concurrency", "task_acks_late",
    "task_track_started", "task_ignore_result", "task_reject_on_worker_lost", "result_extended",
}  # fmt: skip
#: Settings of the serializer, with the values that are accepted.
_JSON_SETTINGS = {"task_serializer": ("json",), "result_serializer": ("json",), "accept_content": (["json"], ("json",))}
#: A rate such as `10/m`: a number, and `s`, `m` or `h` for second, minute or hour. A rate without a letter is per
#: second.
_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/([smh]))?")


def not_supported(name: str) -> NotSupported:
    """The error for an option or a setting that leasehold.celery does not have."""
    return NotSupported(f"leasehold.celery has no {name}: {REFUSED.get(name, 'see docs/guides/from-celery.md')}")


def check_setting(name: str, value: Any) -> None:
    """Raises NotSupported for a setting that leasehold.celery does not have."""
    if name in _JSON_SETTINGS and value in _JSON_SETTINGS[name]:
        return
    if name not in SETTINGS and name != "task_default_queue":  # the app uses the value of `task_default_queue`
        raise not_supported("serializer" if name in _JSON_SETTINGS else name)


@dataclass(frozen=True, slots=True)
class CeleryOptions:
    """The options of one task. `delay`, `backoff` and `longest_backoff` are in seconds. `backoff` is 0 if each retry
    waits for `delay`. `queue`: None means the app's default queue.
    """

    bind: bool
    max_retries: int | None
    delay: float
    autoretry_for: tuple[type[Exception], ...]
    backoff: float
    longest_backoff: float
    jitter: bool
    queue: str | None
    time_limit: timedelta
    limit: Limit | None

    @property
    def times(self) -> int:
        """How often a run may be tried again. With `max_retries=None`, as often as Leasehold allows (MAX_TIMES)."""
        return MAX_TIMES if self.max_retries is None else self.max_retries


def options_of(given_options: Mapping[str, Any]) -> CeleryOptions:
    """Read the options that a program gives to `@app.task`. Raises NotSupported."""
    # Each option that is read is removed from `unread_options`. An option that remains there is not supported.
    unread_options = {name: value for name, value in given_options.items() if name not in IGNORED}
    backoff = unread_options.pop("retry_backoff", False)
    options = CeleryOptions(
        bind=unread_options.pop("bind", False),
        max_retries=unread_options.pop("max_retries", 3),
        delay=float(unread_options.pop("default_retry_delay", 180)),
        autoretry_for=tuple(unread_options.pop("autoretry_for", ())),
        backoff=float(backoff),  # as in Celery, True means 1 second
        longest_backoff=float(unread_options.pop("retry_backoff_max", 600)),
        jitter=unread_options.pop("retry_jitter", True),
        queue=unread_options.pop("queue", None) or None,
        time_limit=timedelta(seconds=unread_options.pop("time_limit", None) or 86_400),
        limit=_limit_of(unread_options.pop("rate_limit", None)),
    )
    if unread_options.get("serializer") == "json":
        del unread_options["serializer"]
    if unread_options:
        raise not_supported(next(iter(unread_options)))
    return options


def _limit_of(rate: str | float | None) -> Limit | None:
    """The Limit for a `rate_limit`. Returns None if the rate is None or 0, which means no limit. Celery applies a rate
    to each worker, but Leasehold applies it to the whole installation.
    """
    if rate is None:
        return None
    match = _RATE.fullmatch(str(rate))
    per_minute = Decimal(match[1]) * {"h": 1, "m": 60, "s": 3600}[match[2] or "s"] / 60 if match is not None else None
    if per_minute == 0:
        return None
    if per_minute is None or per_minute != int(per_minute):
        reason = "it must be a whole number a minute, such as '10/m' or '120/h'"
        raise NotSupported(f"leasehold.celery has no rate_limit {rate!r}: {reason}")
    return Limit(per_minute=int(per_minute))
