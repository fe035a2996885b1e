"""How many connections to PostgreSQL a process has: `database_pool_size` at most, and what each part takes of them.

| process | for itself | the pool |
|---|---|---|
| worker | heartbeat, claims, settlements | the rest |
| API | submissions | the rest |

Where PostgreSQL is the broker, too, each has two more for itself: one notifies, one listens. Nothing else in a process
opens a connection (tests/security/test_connections.py).
"""

from __future__ import annotations

from leasehold.settings import Settings

_WORKER = 3
_API = 1
_BROKER = 2


def pool_of_worker(settings: Settings) -> int:
    """The most connections of a worker's pool."""
    return settings.database_pool_size - _WORKER - _of_broker(settings)


def pool_of_api(settings: Settings) -> int:
    """The most connections of an API process's pool."""
    return settings.database_pool_size - _API - _of_broker(settings)


def _of_broker(settings: Settings) -> int:
    return _BROKER if settings.broker == "postgres" else 0
