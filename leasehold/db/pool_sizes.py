"""Computes the sizes of the pools of PostgreSQL connections. A process has at most `database_pool_size` connections to
the primary. Some of these connections are dedicated to one use each, and the pool has the rest.

| process | dedicated connections | the pool |
|---|---|---|
| worker | heartbeat, claims, settlements (how attempts ended), logs, streams, journals, bulk operations | the rest |
| API | submissions | the rest |
| a program with an App | none | all |

With `broker=postgres` (workers learn of due tasks by NOTIFY) each process has two more dedicated connections: one sends
NOTIFY, one listens. Nothing else in a process opens a connection (tests/security/test_connections.py).

With a replica, an API process has two pools of the same size: one to the primary and one to the standby. A worker has
one connection to the standby.
"""

from __future__ import annotations

from leasehold.settings import Settings

#: The numbers of dedicated connections, as in the table above.
_DEDICATED_OF_WORKER = 7
_DEDICATED_OF_API = 1
_DEDICATED_OF_BROKER = 2


def pool_of_worker(settings: Settings) -> int:
    """The size of a worker's pool."""
    return settings.database_pool_size - _DEDICATED_OF_WORKER - _dedicated_of_broker(settings)


def pool_of_api(settings: Settings) -> int:
    """The size of an API process's pool."""
    return settings.database_pool_size - _DEDICATED_OF_API - _dedicated_of_broker(settings)


def pool_of_app(settings: Settings) -> int:
    """The size of the pool of an App in the user's own program."""
    return settings.database_pool_size - _dedicated_of_broker(settings)


def _dedicated_of_broker(settings: Settings) -> int:
    return _DEDICATED_OF_BROKER if settings.broker == "postgres" else 0


def pool_of_replica(settings: Settings) -> int:
    """The size of an API process's pool to the standby. The process has these connections in addition to those to the
    primary.
    """
    return pool_of_api(settings)


#: The size of a worker's pool to the standby. Only the exporter uses it.
EXPORTER_REPLICA_POOL = 1
