"""Encodes and decodes hints as messages. A hint tells workers that a task is due. A message has headers, and a body
such as `{"v":2,"task":"<uuid>","queue":"media","band":1,"tenant":"acme"}`. The band is the task's priority (BANDS:
high, normal, low).

Decoding is strict, because anybody who can write to the queue may send anything. The worker drops a message that is not
exactly a hint. A new field needs a new version. A worker of an earlier release drops hints of newer versions, but it
finds their tasks when it polls the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import orjson
from asyncpg.pgproto import pgproto

from leasehold.broker.base import BANDS, Hint

#: The version of the hints that this release publishes.
VERSION = 2
#: The version of the hints of earlier releases, which have no tenant.
_WITHOUT_TENANT = 1
#: The largest body of a message. A hint has about 100 bytes.
MAX_BYTES = 4096
#: The most characters of a queue's name.
MAX_QUEUE_NAME = 200
#: A longer tenant name is cut, because workers use it only to take the hints of the tenants in turn.
MAX_TENANT = 200
#: A hint has at most MAX_HEADERS headers. The name and the value of a header together have at most
#: MAX_HEADER_CHARACTERS.
MAX_HEADERS = 16
MAX_HEADER_CHARACTERS = 1024

#: The members of a message's body, for each version.
_FIELDS = {_WITHOUT_TENANT: {"v", "task", "queue", "band"}, VERSION: {"v", "task", "queue", "band", "tenant"}}


class Garbage(ValueError):
    """The message is not a hint. `kind`: the reason, as one of a few words for a metric's label."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def encode(hint: Hint) -> bytes:
    """The message's body. The publisher sends the hint's headers as the message's headers."""
    tenant = hint.tenant[:MAX_TENANT]
    # str() is needed, because asyncpg's UUIDs are of a subclass, which orjson refuses.
    return orjson.dumps({
        "v": VERSION, "task": str(hint.task_id), "queue": hint.queue, "band": hint.band, "tenant": tenant
    })  # fmt: skip


def decode(body: bytes, headers: Mapping[str, Any] | None = None) -> Hint:
    """The hint in a delivered message. Raises Garbage."""
    if len(body) > MAX_BYTES:
        raise Garbage("oversized")
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Garbage("not_json") from None
    if not isinstance(message, dict):
        raise Garbage("wrong_shape")
    version = message.get("v")
    if type(version) is not int or version not in _FIELDS:
        raise Garbage("wrong_version")
    if message.keys() != _FIELDS[version]:
        raise Garbage("wrong_shape")
    return Hint(
        _task_id_of(message["task"]),
        _queue_of(message["queue"]),
        _band_of(message["band"]),
        _headers_of(headers or {}),
        _tenant_of(message.get("tenant", "")),
    )


def _task_id_of(value: object) -> UUID:
    if isinstance(value, str):
        try:
            # This class is written in C, so it is fast. A worker makes a UUID for each hint, and hashes it five times.
            return pgproto.UUID(value)
        except ValueError:
            pass  # raised below, as for every other wrong value
    raise Garbage("wrong_value")


def _queue_of(value: object) -> str:
    if isinstance(value, str) and 0 < len(value) <= MAX_QUEUE_NAME:
        return value
    raise Garbage("wrong_value")


def _tenant_of(value: object) -> str:
    if isinstance(value, str) and len(value) <= MAX_TENANT:
        return value
    raise Garbage("wrong_value")


def _band_of(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(BANDS):
        return value
    raise Garbage("wrong_value")


def _headers_of(headers: Mapping[str, Any]) -> dict[str, str]:
    """The hint's own headers, which are short strings. Longer strings are left out, and so are the tables and numbers
    that the broker adds (`x-death`). If more than MAX_HEADERS are left, the result is empty.
    """
    strings = {
        name: value
        for name, value in headers.items()
        if isinstance(value, str) and len(name) + len(value) <= MAX_HEADER_CHARACTERS
    }
    return strings if len(strings) <= MAX_HEADERS else {}
