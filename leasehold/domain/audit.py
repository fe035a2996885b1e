"""Says who did an act (`Actor`), and checks that no row of the audit was changed or removed (`Chain`). Each row records
an act, and has the hash of the row before it.

Each tenant has a chain of its own. The chain `*` has the acts that concern all tenants, or no tenant. PostgreSQL
computes the hashes when the act commits (migration 0022). `hash_of` computes the same hash, so that an export can be
checked anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

#: The chain of acts that concern all tenants (on queues, workers and common limits), or no tenant (refused sign-ins).
SHARED_CHAIN = "*"
ActorKind: TypeAlias = Literal["key", "person", "command", "platform"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: The fields that a row's hash covers after `previous` (the hash of the previous row), `seq` and `at`, in this order.
HASHED_FIELDS = (
    "tenant_id",
    "actor_kind",
    "actor",
    "actor_tenant",
    "key_prefix",
    "action",
    "target_kind",
    "target",
    "source_ip",
    "request_id",
    "details",
)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did an act. `name`: the client of a key, a person, or `user@host` of a command. `tenant_id`: the tenant that
    the actor belongs to; the act may concern another tenant. `key_prefix`: the public part of the API key. `source_ip`
    and `request_id`: those of the request.
    """

    kind: ActorKind
    name: str
    tenant_id: str | None = None
    key_prefix: str | None = None
    source_ip: str | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """In a chain, the first row that is missing or has changed since it was written. `why`: what does not match, for
    people to read.
    """

    tenant_id: str
    seq: int
    why: str


@dataclass(slots=True)
class Chain:
    """Checks the rows of one chain in order. `seq` and `hash`: the number and the hash of the last checked row. Before
    the first check, give the number and the hash of the row that stands before the rows to check. If the check begins
    at the oldest stored row, that is the last row that retention deleted. If retention has deleted no row, `seq` is 0
    and `hash` is "".
    """

    tenant_id: str
    seq: int = 0
    hash: str = ""

    @classmethod
    def from_head(cls, head: Mapping[str, Any]) -> Chain:
        """A check that begins at the oldest stored row. `head`: the chain's row of `audit_chain`."""
        return cls(head["tenant_id"], head["first_seq"] - 1, head["first_previous"])

    def check_end(self, head: Mapping[str, Any]) -> BrokenRow | None:
        """Compare the last checked row with `head`, the chain's row of `audit_chain`. Call this when all rows are
        checked. Returns None if the row and `head` agree.
        """
        if self.seq < head["seq"]:
            return BrokenRow(self.tenant_id, self.seq + 1, "the row is missing, and all after it")
        if self.hash != head["hash"]:
            return BrokenRow(self.tenant_id, self.seq, "it is not the row that the chain ends with")
        return None

    def check(self, row: Mapping[str, Any]) -> BrokenRow | None:
        """Check the next row of the chain. `row`: the fields of the API's answer, except that `details` is a text.
        Returns None if the row is good.
        """
        seq = int(row["seq"])
        if seq != self.seq + 1:
            return BrokenRow(self.tenant_id, self.seq + 1, f"the row is missing: row {seq} comes next")
        if row["previous"] != self.hash:
            return BrokenRow(self.tenant_id, seq, "it does not follow the row before it")
        if hash_of(row) != row["hash"]:
            return BrokenRow(self.tenant_id, seq, "its content is not what was written")
        self.seq, self.hash = seq, row["hash"]
        return None


def hash_of(row: Mapping[str, Any]) -> str:
    """The hash that a row must have: SHA-256, in hexadecimal, over its fields. Each field is hashed with its length.
    Without the lengths, somebody could move text from one field to the next, and the hash would stay the same.
    """
    at: datetime = row["at"]
    fields = [
        row["previous"],
        str(row["seq"]),
        str((at - _EPOCH) // _MICROSECOND),
        *(row[name] for name in HASHED_FIELDS),
    ]
    return hashlib.sha256("".join(map(_field, fields)).encode()).hexdigest()


def _field(text: str | None) -> str:
    # The length of the text comes first. `-` stands for None, so that None differs from an empty text.
    return "-," if text is None else f"{len(text.encode())}:{text},"
