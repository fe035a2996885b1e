"""The rows of people: a sign-in, and a change, concern one person of one issuer, in the tenants that are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import orjson
import pytest

from leasehold.db.database import Connection, connect
from leasehold.domain.audit import Actor
from leasehold.domain.errors import Conflict
from leasehold.limits import people
from leasehold.limits.people import Change
from leasehold.security.openid import Identity
from leasehold.settings import Settings
from tests.support.lock_waits import until_waiting

ROOM = 100
ADMIN = Actor("person", "an admin")


@pytest.fixture
async def other(settings: Settings) -> AsyncIterator[Connection]:
    opened = await connect(settings, "tests")
    yield opened
    await opened.close()


def person(subject: str = "1", issuer: str = "https://a.example", login: str | None = None, name: str = "") -> Identity:
    return Identity(issuer, subject, login or f"{subject} of {issuer}", name, frozenset())


async def enter(connection: Connection, identity: Identity, *tenants: str, room: int = ROOM) -> list[Any]:
    return await people.record_sign_in(connection, identity, {tenant: ["jobs:read"] for tenant in tenants}, room)


async def all_rows(connection: Connection) -> dict[tuple[str, str, str], Any]:
    rows = await connection.fetch("SELECT * FROM person")
    return {(row["issuer"], row["subject"], row["tenant_id"]): row for row in rows}


async def test_a_person_is_an_issuer_and_a_subject_and_both_count(connection: Connection) -> None:
    mine = person()
    others = [person("2"), person(issuer="https://b.example")]
    for identity in (mine, *others):
        await enter(connection, identity, "t", "u")
    rows = await people.rows_of_subject(connection, mine.issuer, mine.subject)
    assert [(row["issuer"], row["subject"], row["tenant_id"]) for row in rows] == [
        (mine.issuer, mine.subject, tenant) for tenant in ("t", "u")
    ]
    before = await all_rows(connection)
    await enter(connection, mine, "t")  # its groups give access to `u` no more
    after = await all_rows(connection)
    lost = (mine.issuer, mine.subject, "u")
    assert (after[lost]["scopes"], after[lost]["generation"]) == ([], before[lost]["generation"] + 1)
    assert after[lost]["sessions_ended_at"] is not None
    kept = before.keys() - {lost, (mine.issuer, mine.subject, "t")}
    assert {place: after[place] for place in kept} == {place: before[place] for place in kept}


async def test_a_tenant_without_room_lets_in_whom_it_knows_and_not_their_namesake_of_another_issuer(
    connection: Connection,
) -> None:
    await enter(connection, person(), "t", room=1)
    await enter(connection, person(), "t", room=1)
    for stranger in (person("2"), person(issuer="https://b.example")):
        with pytest.raises(Conflict, match="people") as refused:
            await enter(connection, stranger, "t", room=1)
        assert refused.value.code == "too_many_people"
    assert len(await all_rows(connection)) == 1


async def test_of_two_new_people_at_once_only_one_gets_the_last_place(
    connection: Connection, other: Connection, settings: Settings
) -> None:
    async with connection.transaction():
        await enter(connection, person(), "t", room=1)
        second = asyncio.create_task(enter(other, person("2"), "t", room=1))
        watcher = await connect(settings, "tests")
        await until_waiting(watcher, kind="advisory")
        await watcher.close()
    with pytest.raises(Conflict):
        await second
    assert len(await all_rows(connection)) == 1


async def test_a_login_is_told_apart_only_from_the_same_login_in_the_tenant_and_stays(connection: Connection) -> None:
    first, namesake, elsewhere = (person(subject, login="ann@a.example") for subject in ("1", "2", "3"))
    (row,) = await enter(connection, first, "t")
    assert row["login"] == "ann@a.example"
    (row,) = await enter(connection, elsewhere, "u")
    assert row["login"] == "ann@a.example"
    for _ in range(2):
        (row,) = await enter(connection, namesake, "t")
        assert row["login"] == f"ann@a.example#{str(row['id'])[-8:]}"
    (row,) = await enter(connection, first, "t")
    assert row["login"] == "ann@a.example"


async def test_two_people_who_get_the_same_new_login_at_once_are_told_apart(
    connection: Connection, other: Connection, settings: Settings
) -> None:
    for subject in ("1", "2"):
        await enter(connection, person(subject), "t")
    async with connection.transaction():
        await enter(connection, person("1", login="ann@a.example"), "t")
        second = asyncio.create_task(enter(other, person("2", login="ann@a.example"), "t"))
        watcher = await connect(settings, "tests")
        await until_waiting(watcher, kind="advisory")
        await watcher.close()
    (row,) = await second
    assert row["login"] == f"ann@a.example#{str(row['id'])[-8:]}"


async def test_a_role_gives_nothing_to_a_person_to_whom_no_group_gives_access(connection: Connection) -> None:
    (row,) = await enter(connection, person(), "t")
    async with connection.transaction():
        found = await people.find(connection, row["id"], "t")
        await people.change(connection, ADMIN, found, Change(role="admin"))
    assert (await session_row(connection, row["id"]))["scopes"] == ["role:admin"]
    await people.record_sign_in(connection, person(), {}, ROOM)
    assert (await session_row(connection, row["id"]))["scopes"] == []


async def session_row(connection: Connection, person_id: UUID) -> Any:
    row = await people.find_for_session(connection, person_id)
    assert row is not None
    return row


async def test_who_changes_a_person_has_its_row_alone(connection: Connection, other: Connection) -> None:
    (row,) = await enter(connection, person(), "t")
    async with connection.transaction():
        await people.find(connection, row["id"], "t")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await other.execute("SELECT FROM person WHERE id = $1 FOR UPDATE NOWAIT", row["id"])


@pytest.mark.parametrize("text", ["ann", "NN@", "example", "Lee", "lEE b"])
async def test_people_are_found_by_any_part_of_login_or_name_in_any_case(connection: Connection, text: str) -> None:
    await enter(connection, person("1", login="Ann@a.example", name="A. Lee Brown"), "t")
    await enter(connection, person("2", login="bob@b.test", name="Bob"), "t")
    await enter(connection, person("3", login="Ann@a.example", name="A. Lee Brown"), "u")
    assert [row["subject"] for row in await people.search(connection, "t", text, 10)] == ["1"]


async def test_only_who_is_disabled_just_now_loses_the_sessions(connection: Connection) -> None:
    (row,) = await enter(connection, person(), "t")

    async def changed(change: Change) -> tuple[int, bool]:
        async with connection.transaction():
            await people.change(connection, ADMIN, await people.find(connection, row["id"], None), change)
        present = await session_row(connection, row["id"])
        ended_at = present["sessions_ended_at"]
        await connection.execute("UPDATE person SET sessions_ended_at = NULL")
        return present["generation"], ended_at is not None

    assert await changed(Change(role="viewer")) == (0, False)
    assert await changed(Change(disabled=True)) == (1, True)
    assert await changed(Change(role="operator")) == (1, False)
    assert await changed(Change(disabled=False)) == (1, False)
    written = await connection.fetch("SELECT action, details FROM audit WHERE target = $1 ORDER BY seq", str(row["id"]))
    assert [(entry["action"], orjson.loads(entry["details"]).get("before")) for entry in written] == [
        ("person.role_set", None),
        ("person.disabled", None),
        ("person.role_set", "viewer"),
        ("person.enabled", None),
    ]


def test_a_session_of_the_second_in_which_sessions_were_ended_has_ended_too() -> None:
    ended_at = datetime(2026, 1, 1, tzinfo=UTC)
    row: Any = {"sessions_ended_at": ended_at}
    began = int(ended_at.timestamp())
    assert [people.has_ended(row, began + seconds) for seconds in (-1, 0, 1)] == [True, True, False]
    assert not people.has_ended({"sessions_ended_at": None}, began)  # type: ignore[arg-type]  # stands for a row


async def test_nobody_changes_the_own_row(connection: Connection) -> None:
    (row,) = await enter(connection, person(), "t")
    people.refuse_own_person(uuid4(), row)
    people.refuse_own_person(None, row)
    with pytest.raises(Conflict) as refused:
        people.refuse_own_person(row["id"], row)
    assert refused.value.code == "own_person"


async def test_who_stays_away_is_forgotten_but_whose_row_somebody_holds_or_an_admin_has_changed(
    connection: Connection, other: Connection
) -> None:
    names = ("gone", "held", "disabled", "with a role", "here")
    ids = {name: (await enter(connection, person(name), "t"))[0]["id"] for name in names}
    seen = datetime.now(UTC) - timedelta(days=31)
    await connection.execute("UPDATE person SET seen_at = $1 WHERE subject <> 'here'", seen)
    await connection.execute("UPDATE person SET disabled_at = now() WHERE subject = 'disabled'")
    await connection.execute("UPDATE person SET set_role = 'viewer' WHERE subject = 'with a role'")
    async with other.transaction():
        await other.execute("SELECT FROM person WHERE id = $1 FOR UPDATE", ids["held"])
        await connection.execute("SET lock_timeout = '5s'")
        assert not await people.forget(connection, 30)
    assert {subject for _, subject, _ in await all_rows(connection)} == set(names) - {"gone"}
