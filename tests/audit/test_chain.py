"""The chain of the audit: its hashes, its locks, what a look finds of it, and its retention; on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from leasehold.api.auth.audit import record
from leasehold.api.process.keyring import Caller
from leasehold.db import audit
from leasehold.db.audit import AuditFilter, Target
from leasehold.db.database import Connection, connect
from leasehold.domain.audit import Actor, BrokenRow, hash_of
from leasehold.settings import Settings

ANNA = Actor("key", "anna", "acme", "abcdefghijkl", "192.0.2.7", "request-1")
DAY = timedelta(days=1)


async def act(rows: Connection, n: int = 1, tenant: str = "acme", **details: Any) -> None:
    for number in range(n):
        await audit.record(rows, ANNA, "job.cancelled", Target("job", f"j{number}", tenant), **details)


async def verified(rows: Connection, tenant: str = "acme") -> BrokenRow | None:
    (head,) = await audit.heads(rows, tenant)
    return await audit.verify(rows, head)


async def whole(rows: Connection, tenant: str = "acme") -> list[dict[str, Any]]:
    (head,) = await audit.heads(rows, tenant)
    return await audit.read_part(rows, head, head["first_seq"] - 1)


async def test_each_row_has_the_hash_of_the_row_before(rows: Connection) -> None:
    await act(rows, 3)
    first, second, third = await whole(rows)
    assert [row["seq"] for row in (first, second, third)] == [1, 2, 3]
    assert first["previous"] == ""
    assert (second["previous"], third["previous"]) == (first["hash"], second["hash"])
    assert (await audit.heads(rows, "acme"))[0]["hash"] == third["hash"]
    assert await verified(rows) is None


async def test_an_act_of_the_api_stands_in_the_chain_of_the_tenant_whose_object_it_changed(rows: Connection) -> None:
    caller = Caller("ops", "anna", "abcdefghijkl", "abcdefghijkl", frozenset())
    await record(rows, caller, "key.create", "k1", scopes=["runs:read"])
    await record(rows, caller, "limit.set.again", "l1", tenant_id="acme")
    (own,), (others,) = await whole(rows, "ops"), await whole(rows, "acme")
    assert (own["action"], own["target_kind"], own["target"], own["actor"]) == ("key.create", "key", "k1", "anna")
    assert json.loads(own["details"]) == {"scopes": ["runs:read"]}
    assert (others["action"], others["target_kind"], others["target"]) == ("limit.set.again", "limit", "l1")


@pytest.mark.parametrize("text", ["", "é", "🦊 fox", "1:a,", "-,", 'a"b\\c\n\t', "\u202eright to left", "x" * 3000])
async def test_postgresql_and_python_compute_the_same_hash(rows: Connection, text: str) -> None:
    odd = Actor("person", text, None, None, None, text)
    await audit.record(rows, odd, text, Target(text, text, text), given=text, number=1.5, nothing=None, many=[{"a": 1}])
    (row,) = await whole(rows, text)
    assert hash_of(row) == row["hash"]
    assert audit.details_text(audit.as_answer(row)["details"]) == row["details"]


@pytest.mark.parametrize("moved", [("ab", "c"), ("a", "bc")])
async def test_no_text_moves_from_one_field_to_the_next_unnoticed(rows: Connection, moved: tuple[str, str]) -> None:
    await audit.record(rows, ANNA, "job.cancelled", Target("ab", "c", "acme"))
    (row,) = await whole(rows)
    assert (hash_of(row | {"target_kind": moved[0], "target": moved[1]}) == row["hash"]) == (moved == ("ab", "c"))


CHANGES = {
    "at": "at + interval '1 microsecond'", "actor_kind": "'platform'", "actor": "'bob'", "actor_tenant": "NULL",
    "key_prefix": "'x'", "action": "'job.retried'", "target_kind": "'run'", "target": "'j9'", "source_ip": "NULL",
    "request_id": "''", "details": "'{ }'", "hash": "sha256('x')", "previous": "sha256('x')",
}  # fmt: skip


@pytest.mark.parametrize("column", CHANGES)
async def test_a_changed_row_is_named(rows: Connection, column: str) -> None:
    await act(rows, 5)
    await rows.execute(f"UPDATE audit SET {column} = {CHANGES[column]} WHERE seq = 3")
    broken = await verified(rows)
    assert broken is not None
    assert (broken.tenant_id, broken.seq) == ("acme", 3)


def test_each_column_that_a_row_has_is_tried_above() -> None:
    from leasehold.db.audit_tables import audit as table  # noqa: PLC0415 - only this test needs SQLAlchemy

    assert {column.name for column in table.columns} == CHANGES.keys() | {"id", "tenant_id", "seq"}


@pytest.mark.parametrize(
    ("statement", "seq"),
    [
        ("DELETE FROM audit WHERE seq = 1", 1),
        ("DELETE FROM audit WHERE seq = 3", 3),
        ("DELETE FROM audit WHERE seq >= 4", 4),
        ("DELETE FROM audit", 1),
        ("UPDATE audit SET tenant_id = 'other' WHERE seq = 2", 2),
        ("UPDATE audit SET seq = 6 WHERE seq = 5", 5),
    ],
)
async def test_a_row_that_is_missing_is_named(rows: Connection, statement: str, seq: int) -> None:
    await act(rows, 5)
    await rows.execute(statement)
    broken = await verified(rows)
    assert broken is not None
    assert (broken.seq, "missing" in broken.why) == (seq, True)


async def test_a_row_that_was_changed_with_its_hash_breaks_the_row_after_it(rows: Connection) -> None:
    await act(rows, 3)
    second = (await whole(rows))[1] | {"actor": "bob"}
    await rows.execute("UPDATE audit SET actor = 'bob', hash = decode($1, 'hex') WHERE seq = 2", hash_of(second))
    broken = await verified(rows)
    assert broken is not None
    assert (broken.seq, broken.why) == (3, "it does not follow the row before it")
    await rows.execute("UPDATE audit SET actor = 'bob', hash = decode($1, 'hex') WHERE seq = 2", second["hash"])
    last = (await whole(rows))[2] | {"actor": "bob"}
    await rows.execute("UPDATE audit SET actor = 'anna', hash = decode($1, 'hex') WHERE seq = 2", second["hash"])
    await rows.execute("UPDATE audit SET actor = 'bob', hash = decode($1, 'hex') WHERE seq = 3", hash_of(last))
    broken = await verified(rows)
    assert broken is not None
    assert broken.seq == 3  # the head is not what the last row has


async def test_acts_at_the_same_time_stand_in_one_chain_without_a_gap(settings: Settings, rows: Connection) -> None:
    connections = [await connect(settings, "test") for _ in range(6)]
    await asyncio.gather(*(act(connection, 20) for connection in connections))
    for connection in connections:
        await connection.close()
    assert [row["seq"] for row in await whole(rows)] == list(range(1, 121))
    assert await verified(rows) is None


async def test_an_act_waits_for_no_other_before_its_commit(settings: Settings, rows: Connection) -> None:
    """The chain is locked by the commit alone: work in transactions goes on side by side, in any order of locks."""
    other = await connect(settings, "test")
    await act(rows)
    await rows.execute("CREATE TABLE thing (n int)")
    await rows.execute("INSERT INTO thing VALUES (1), (2)")
    async with rows.transaction():
        await act(rows)
        async with other.transaction():
            await other.execute("UPDATE thing SET n = n WHERE n = 2")
            await act(other)
        async with other.transaction():  # it has committed while the first still works
            await act(other)
            await other.execute("UPDATE thing SET n = n WHERE n = 2")
        await rows.execute("UPDATE thing SET n = n WHERE n = 2")
    await other.close()
    assert len(await whole(rows)) == 4
    assert await verified(rows) is None


async def test_an_act_that_is_rolled_back_leaves_no_row_and_no_gap(rows: Connection) -> None:
    transaction = rows.transaction()
    await transaction.start()
    await act(rows, 2)
    await transaction.rollback()
    await act(rows)
    assert [row["seq"] for row in await whole(rows)] == [1]


async def test_each_tenant_has_a_chain_of_its_own(rows: Connection) -> None:
    await act(rows, 2)
    await act(rows, 1, "other")
    await rows.execute("UPDATE audit SET actor = 'bob' WHERE tenant_id = 'other'")
    assert await verified(rows) is None
    assert (await verified(rows, "other")) is not None


async def older(rows: Connection, days: int, seqs: str, tenant: str = "acme") -> None:
    """Let rows be older, with hashes as if they had been written then."""
    await rows.execute(
        f"UPDATE audit SET at = at - $1::interval WHERE seq = ANY('{{{seqs}}}') AND tenant_id = $2", days * DAY, tenant
    )
    previous = ""
    for row in await whole(rows, tenant):
        digest = hash_of(row | {"previous": previous})
        await rows.execute(
            "UPDATE audit SET previous = decode($2, 'hex'), hash = decode($3, 'hex') WHERE id = $1",
            row["id"], previous, digest,
        )  # fmt: skip
        previous = digest
    await rows.execute("UPDATE audit_chain SET hash = decode($1, 'hex') WHERE tenant_id = $2", previous, tenant)


async def test_old_rows_go_from_the_beginning_on_and_the_rest_is_verified(rows: Connection) -> None:
    await act(rows, 6)
    await older(rows, 50, "1,2,3,5")
    assert await verified(rows) is None
    await audit.forget(rows, 60)
    assert len(await whole(rows)) == 6
    assert await audit.forget(rows, 40, at_most=2)  # more rows may be due
    assert [row["seq"] for row in await whole(rows)] == [3, 4, 5, 6]
    assert await verified(rows) is None
    assert not await audit.forget(rows, 40)
    assert not await audit.forget(rows, 40)
    assert [row["seq"] for row in await whole(rows)] == [4, 5, 6]  # 5 waits for 4
    assert await verified(rows) is None
    await rows.execute("DELETE FROM audit WHERE seq = 4")
    broken = await verified(rows)
    assert broken is not None
    assert broken.seq == 4


async def test_rows_that_somebody_deleted_keep_no_row_of_any_tenant_beyond_its_time(rows: Connection) -> None:
    await act(rows, 6)
    await act(rows, 2, tenant="rival")
    await rows.execute("UPDATE audit SET at = at - interval '60 days' WHERE tenant_id = 'acme' AND seq < 6")
    await rows.execute("UPDATE audit SET at = at - interval '50 days' WHERE tenant_id = 'rival'")
    await rows.execute("DELETE FROM audit WHERE tenant_id = 'acme' AND seq IN (1, 2, 4)")
    for is_more_due in (True, True, True, True, False):
        assert await audit.forget(rows, 40, at_most=1) is is_more_due
    kept = await rows.fetch("SELECT tenant_id, seq FROM audit")
    assert [tuple(row) for row in kept] == [("acme", 6)]
    assert await verified(rows) is None


async def test_a_chain_whose_rows_are_all_gone_goes_on(rows: Connection) -> None:
    await act(rows, 2)
    await older(rows, 50, "1,2")
    await audit.forget(rows, 40)
    assert await whole(rows) == []
    assert await verified(rows) is None
    await act(rows)
    assert [row["seq"] for row in await whole(rows)] == [3]
    assert await verified(rows) is None


@pytest.mark.parametrize("newest", [None, 5])
async def test_rows_that_retention_deletes_after_the_head_was_read_are_not_missing(
    rows: Connection, newest: int | None
) -> None:
    await act(rows, 6)
    await older(rows, 50, "1,2,3,4,5,6")
    (head,) = await audit.heads(rows, "acme")
    last = (await whole(rows))[3]
    head_at_4 = head | {"seq": last["seq"], "hash": last["hash"]}

    async def check(one: dict[str, Any]) -> BrokenRow | None:
        return await (audit.verify(rows, one) if newest is None else audit.verify_newest(rows, one, newest))

    await audit.forget(rows, 40, at_most=3)
    assert await check(head) is None
    forged = await check(head | {"hash": head["first_previous"]})
    assert (forged and forged.why) == "it is not the row that the chain ends with"
    await rows.execute("DELETE FROM audit WHERE seq = 5")
    missing = await check(head)
    assert (missing and missing.seq) == 5
    await audit.forget(rows, 40, at_most=1)
    assert await check(head_at_4) is None  # the deleted rows end with the head
    forged = await check(head_at_4 | {"hash": head["hash"]})
    assert (forged and forged.why) == "it is not the row that the chain ends with"
    await audit.forget(rows, 40)
    assert await whole(rows) == []
    assert await check(head_at_4) is None
    await rows.execute("DELETE FROM audit_chain")
    missing = await check(head_at_4)
    assert missing is not None


async def test_rows_that_retention_deletes_between_two_reads_of_a_check_are_not_missing(
    rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await act(rows, 6)
    await older(rows, 50, "1,2,3,4")
    read_part = audit.read_part

    async def read_and_forget(*arguments: Any) -> list[dict[str, Any]]:
        read = (await read_part(*arguments))[:2]
        await audit.forget(rows, 40, at_most=4)
        return read

    monkeypatch.setattr(audit, "read_part", read_and_forget)
    assert await verified(rows) is None
    assert [row["seq"] for row in await rows.fetch("SELECT seq FROM audit ORDER BY seq")] == [5, 6]


async def test_a_row_that_is_missing_among_the_rows_that_were_read_is_named_although_retention_deletes_them(
    rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await act(rows, 4)
    await older(rows, 50, "1,2,3,4")
    await rows.execute("DELETE FROM audit WHERE seq = 2")
    read_part = audit.read_part

    async def read_and_forget(*arguments: Any) -> list[dict[str, Any]]:
        read = await read_part(*arguments)
        await audit.forget(rows, 40)
        return read

    monkeypatch.setattr(audit, "read_part", read_and_forget)
    broken = await verified(rows)
    assert (broken and broken.seq) == 2


@pytest.mark.parametrize("days", [29, 0, -1, None])
async def test_nothing_that_is_new_is_forgotten(rows: Connection, days: int | None) -> None:
    await act(rows)
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await audit.forget(rows, days)  # type: ignore[arg-type]  # as a stranger with the role's password might
    assert len(await whole(rows)) == 1


async def test_a_page_is_filtered_and_followed(rows: Connection) -> None:
    await act(rows, 5)
    await audit.record(rows, Actor("command", "root@host"), "key.revoked", Target("key", "j1", "other"))
    everything = await audit.page(rows, AuditFilter(None), None, 10)
    assert everything[0]["action"] == "key.revoked"
    assert len(everything) == 6

    async def found(**wanted: Any) -> int:
        return len(await audit.page(rows, AuditFilter(**({"tenant_id": None} | wanted)), None, 10))

    assert await found(tenant_id="acme") == 5
    assert await found(actor="anna") == 5
    assert await found(action="key.revoked") == 1
    assert await found(target="j1") == 2
    assert await found(target="j1", tenant_id="acme") == 1
    middle = everything[2]["at"]
    assert await found(since=middle) == 3
    assert await found(until=middle) == 3
    before = (everything[2]["at"], everything[2]["id"])
    assert await audit.page(rows, AuditFilter(None), before, 10) == everything[3:]


async def test_details_are_written_without_what_is_not_given(rows: Connection) -> None:
    await act(rows, 1, reason=None, kind="run")
    assert json.loads((await whole(rows))[0]["details"]) == {"kind": "run"}
