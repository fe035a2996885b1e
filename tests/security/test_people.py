"""Roles, tried on every operation that changes something; and keys over HTTP: nobody gives what they do not have."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest
import time_machine

from leasehold.api.auth import security
from leasehold.api.fleet.people import ANY_GROUP
from leasehold.db.database import Connection
from leasehold.domain.kind import Kind, Scopes
from leasehold.limits import people
from leasehold.pipelines import SHIPPED
from leasehold.security.credentials import NewKey
from leasehold.security.openid import Identity
from leasehold.security.roles import NAMES, expanded, roles_of
from leasehold.settings import Membership
from tests.api.conftest import MakeKey, Running, client_of
from tests.api.media_api import problem
from tests.security.test_scopes import NEEDS, OPENS, OPERATIONS, SCOPES

READS = {"jobs:read", "runs:read", "media:read", "conversion:read", "generation:read"}
#: Written by hand: what each role adds to the one before it.
ADDS = {
    "viewer": READS,
    "operator": {"jobs:operate", "runs:write", "media:write", "conversion:write", "generation:write", "webhooks:write"},
    "admin": {"jobs:delete", "templates:write", "keys:write", "people:write", "audit:read"},
}
#: In no role: all tenants, and a program's own.
BESIDE = {"fleet:operate", "external:work"}
ROLES = {
    "viewer": ADDS["viewer"],
    "operator": ADDS["viewer"] | ADDS["operator"],
    "admin": ADDS["viewer"] | ADDS["operator"] | ADDS["admin"],
}


def test_the_roles_are_these_sets_and_every_scope_has_its_place() -> None:
    assert roles_of(SHIPPED) == ROLES
    assert ROLES["admin"] | BESIDE == SCOPES
    assert tuple(ROLES) == NAMES
    assert not ROLES["admin"] & BESIDE


def test_a_kind_from_outside_is_read_and_changed_by_the_roles() -> None:
    printing = Kind("printing", scopes=Scopes("printing:read", "printing:write"))
    roles = roles_of([printing, Kind("mail", scopes=Scopes("mail:write", "mail:write"))])
    assert "mail:write" not in roles["viewer"]
    assert "mail:write" in roles["operator"]
    assert "printing:read" in roles["viewer"]
    assert "printing:write" not in roles["viewer"]
    assert {"printing:read", "printing:write"} <= roles["operator"]
    assert expanded(["role:nobody", "a:b"], roles) == {"a:b"}


@pytest.mark.parametrize("role", NAMES)
async def test_every_operation_is_tried_as_every_role(api: Running, make_key: MakeKey, role: str) -> None:
    key = await make_key(scopes=(f"role:{role}",))
    async with client_of(api.url, key.text) as person:
        for operation, (method, path) in OPERATIONS.items():
            answer = await person.request(method, path.replace("{", "").replace("}", ""))  # names nothing
            if NEEDS[operation] & ROLES[role]:
                assert answer.status_code not in (401, 403), operation
            else:
                assert answer.status_code == 403, operation


def test_a_viewer_changes_nothing() -> None:
    by_viewer = {name for scope in ROLES["viewer"] for name in OPENS[scope].split()}
    assert {name for name in by_viewer if OPERATIONS[name][0] != "GET"} == {"postImagesQuery", "postVideoQuery"}


@pytest.fixture
async def admin(make_key: MakeKey) -> Any:
    return await make_key(scopes=("role:admin",))


async def test_a_key_ends_by_the_clock_of_the_database(api: Running, admin: Any, rows: Connection) -> None:
    with time_machine.travel(datetime.now(UTC) - timedelta(minutes=10), tick=True):  # an API whose clock is wrong
        async with client_of(api.url, admin.text) as anna:
            body = {"client_id": "bob", "role": "viewer", "expires_in_seconds": 300}
            made = (await anna.post("/v1/keys", json=body)).json()
            async with client_of(api.url, made["key"]) as bob:
                assert (await bob.get("/v1/jobs")).status_code == 200
    ends_at = datetime.fromisoformat(made["expires_at"])
    assert ends_at == await rows.fetchval("SELECT expires_at FROM api_key WHERE prefix = $1", made["prefix"])
    assert ends_at <= await rows.fetchval("SELECT clock_timestamp() + interval '300 s'")


async def test_an_admin_makes_sees_rotates_expires_and_revokes_a_key(
    api: Running, admin: Any, rows: Connection
) -> None:
    async with client_of(api.url, admin.text) as anna:
        body = {"client_id": "bob", "role": "viewer", "expires_in_seconds": 3600}
        made = (await anna.post("/v1/keys", json=body)).json()
        async with client_of(api.url, made["key"]) as bob:
            assert (await bob.get("/v1/jobs")).status_code == 200
            problem(await bob.get("/v1/keys"), 403, "insufficient_scope")
        listed = {row["prefix"]: row for row in (await anna.get("/v1/keys")).json()["keys"]}
        assert (listed[made["prefix"]]["role"], listed[made["prefix"]]["scopes"]) == ("viewer", [])
        assert made["key"].split("_", 2)[2] not in str(listed)
        rotated = (await anna.post(f"/v1/keys/{made['prefix']}/rotate", json={"overlap_seconds": 0})).json()
        assert rotated["expires_at"] == made["expires_at"]
        ended = (await anna.post(f"/v1/keys/{rotated['prefix']}/expire", json={"in_seconds": 60})).json()
        assert (datetime.fromisoformat(ended["expires_at"]) - datetime.now(UTC)).total_seconds() < 120
        assert (await anna.delete(f"/v1/keys/{rotated['prefix']}")).status_code == 204
        left = [row["prefix"] for row in (await anna.get("/v1/keys")).json()["keys"]]
        assert left == [admin.prefix]
        assert len((await anna.get("/v1/keys", params={"ended": "true"})).json()["keys"]) == 3
        problem(await anna.delete("/v1/keys/nosuchprefix"), 404, "key_not_found")
    found = await rows.fetch("SELECT action, details FROM audit ORDER BY at")
    assert [row["action"] for row in found] == ["sign_in.refused"] * (len(found) - 4) + [
        "key.created", "key.rotated", "key.expired", "key.revoked"
    ]  # fmt: skip
    assert made["key"].split("_", 2)[2] not in str(found)


@pytest.mark.parametrize(
    "body",
    [
        {"scopes": ["fleet:operate"]},
        {"scopes": ["external:work"]},
        {"role": "viewer", "scopes": ["fleet:operate"]},
        {"scopes": ["role:admin", "fleet:operate"]},
        {"scopes": ["role:emperor"]},
    ],
)
async def test_nobody_gives_what_they_do_not_have(
    api: Running, admin: Any, rows: Connection, body: dict[str, Any]
) -> None:
    async with client_of(api.url, admin.text) as anna:
        problem(await anna.post("/v1/keys", json={"client_id": "bob"} | body), 403, "scope_not_held")
    assert await rows.fetchval("SELECT count(*) FROM api_key") == 1


async def test_a_key_that_can_more_is_not_rotated_into_ones_own_hands(
    api: Running, admin: Any, make_key: MakeKey, rows: Connection
) -> None:
    stronger = await make_key(scopes=("fleet:operate",))
    async with client_of(api.url, admin.text) as anna:
        problem(await anna.post(f"/v1/keys/{stronger.prefix}/rotate"), 403, "scope_not_held")
    assert await rows.fetchval("SELECT expires_at FROM api_key WHERE prefix = $1", stronger.prefix) is None


async def test_another_tenants_keys_are_out_of_reach(api: Running, admin: Any, make_key: MakeKey) -> None:
    other = await make_key("other", scopes=("jobs:read",))
    operator = await make_key("ops", scopes=("role:admin", "fleet:operate"))
    async with client_of(api.url, admin.text) as anna:
        problem(await anna.post(f"/v1/keys/{other.prefix}/rotate"), 404, "key_not_found")
        problem(await anna.post(f"/v1/keys/{other.prefix}/expire", json={"in_seconds": 1}), 404, "key_not_found")
        problem(await anna.delete(f"/v1/keys/{other.prefix}"), 404, "key_not_found")
        body = {"client_id": "bob", "role": "viewer", "tenant_id": "other"}
        problem(await anna.post("/v1/keys", json=body), 403, "insufficient_scope")
        shown = (await anna.get("/v1/keys", params={"tenant": "other"})).json()["keys"]
        assert {row["tenant_id"] for row in shown} == {"acme"}
        assert (await anna.get("/v1/tenants/usage", params={"tenant": "other"})).json()["tenant_id"] == "acme"
    async with client_of(api.url, operator.text) as ops:
        assert (await ops.post("/v1/keys", json=body)).json()["tenant_id"] == "other"
        assert len((await ops.get("/v1/keys", params={"tenant": "other"})).json()["keys"]) == 2
        assert (await ops.delete(f"/v1/keys/{other.prefix}")).status_code == 204


async def test_the_keys_of_a_tenant_are_bounded_also_at_once(api: Running, admin: Any, rows: Connection) -> None:
    api.services.settings = api.services.settings.model_copy(update={"keys_per_tenant": 3})
    async with client_of(api.url, admin.text) as anna:
        body = {"client_id": "bob", "role": "viewer"}
        answers = await asyncio.gather(*(anna.post("/v1/keys", json=body) for _ in range(6)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 409, 409, 409, 409]
    assert await rows.fetchval("SELECT count(*) FROM api_key") == 3


async def test_rotations_at_most_double_the_keys_of_a_tenant(api: Running, admin: Any) -> None:
    """Each rotation leaves the old key valid for its overlap: without a bound, keys would grow without end."""
    api.services.settings = api.services.settings.model_copy(update={"keys_per_tenant": 1})
    async with client_of(api.url, admin.text) as anna:
        path, body = f"/v1/keys/{admin.prefix}/rotate", {"overlap_seconds": 3600}
        answers = [await anna.post(path, json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 409, 409]
    problem(answers[-1], 409, "too_many_keys")


async def test_what_a_tenant_has_is_counted(api: Running, admin: Any, make_key: MakeKey, rows: Connection) -> None:
    owner = await make_key(scopes=("role:admin",))
    async with client_of(api.url, owner.text) as anna:
        await anna.post("/v1/templates", json={"type": "outside", "steps": [{"id": "only", "queue": "q"}]})
        for _ in range(2):
            assert (await anna.post("/v1/runs", json={"template": "outside"})).status_code == 202
        await rows.execute(
            "INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type, tenant_id)"
            " SELECT id, 'a', job_id, step, 'k', 1000, '', '', tenant_id FROM task"
        )
        usage = (await anna.get("/v1/tenants/usage")).json()
    counts = {name: usage[name] for name in ("unfinished_jobs", "stored_bytes", "templates", "keys", "webhooks")}
    assert counts == {"unfinished_jobs": 2, "stored_bytes": 2000, "templates": 1, "keys": 2, "webhooks": 0}


def test_the_scopes_of_the_roles_are_those_of_the_api() -> None:
    known = {str(value) for name, value in vars(security).items() if name.isupper() and ":" in str(value)}
    assert ROLES["admin"] <= known


async def test_people_are_listed_in_pages(api: Running, admin: Any, rows: Connection) -> None:
    """Also where several signed in at the same instant."""
    for number in range(5):
        await rows.execute(
            "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes, seen_at)"
            " VALUES (gen_random_uuid(), 'acme', 'https://id.example', $1, $1, 'Somebody', '{role:viewer}',"
            " to_timestamp($2))",
            f"p{number}", 1_700_000_000.0 + number // 2,
        )  # fmt: skip
    async with client_of(api.url, admin.text) as http:
        whole = (await http.get("/v1/people")).json()
        logins = [one["login"] for one in whole["people"]]
        assert ({*logins}, logins[0], whole["next_cursor"]) == ({f"p{number}" for number in range(5)}, "p4", None)
        found: list[str] = []
        cursor = None
        while True:
            params: dict[str, Any] = {"limit": 2, "text": "some"} | ({} if cursor is None else {"cursor": cursor})
            page = (await http.get("/v1/people", params=params)).json()
            found += [one["login"] for one in page["people"]]
            if (cursor := page["next_cursor"]) is None:
                break
        assert found == logins
        problem(await http.get("/v1/people?cursor=x"), 422, "invalid_cursor")


async def test_nobody_prepares_for_a_person_without_a_group_what_they_do_not_have(
    api: Running, make_key: MakeKey, rows: Connection
) -> None:
    """The person has nothing now, and would have it from the next sign-in with any group on."""
    ann = Identity("https://id.example", "1", "ann", "Ann", frozenset())
    (row,) = await people.record_sign_in(rows, ann, {"acme": ["role:viewer"]}, 9)
    await people.record_sign_in(rows, ann, {}, 9)
    path = f"/v1/people/{row['id']}"
    weak = await make_key(scopes=("role:viewer", "people:write"))
    admin = await make_key(scopes=("role:admin",))
    chief = await make_key(scopes=("role:admin", "fleet:operate"))

    async def change(key: NewKey, **body: Any) -> httpx2.Response:
        async with client_of(api.url, key.text) as http:
            return await http.patch(path, json=body)

    for role in ("operator", "admin"):
        problem(await change(weak, role=role), 403, "scope_not_held")
    assert await rows.fetchval("SELECT set_role FROM person") is None
    assert (await change(weak, role="viewer", disabled=True)).status_code == 200
    for key in (weak, admin):  # the groups may give the role of an admin, and fleet:operate
        problem(await change(key, role="provider"), 403, "scope_not_held")
    assert (await change(weak, disabled=False)).status_code == 200  # a viewer, whatever the groups give
    assert (await change(admin, role="admin", disabled=True)).status_code == 200
    problem(await change(weak, disabled=False), 403, "scope_not_held")
    assert (await change(chief, role="provider")).status_code == 200
    for key in (weak, admin):
        problem(await change(key, disabled=False), 403, "scope_not_held")
    assert await rows.fetchval("SELECT disabled_at FROM person") is not None
    assert (await change(chief, disabled=False)).json()["disabled_at"] is None


def test_all_that_a_group_can_give_is_what_a_caller_needs_who_lets_the_groups_decide() -> None:
    fields = Membership.model_json_schema()["properties"]
    groups_give = {f"role:{name}" for name in fields["role"]["enum"]} | {fields["scopes"]["items"]["const"]}
    assert expanded(groups_give, roles_of(SHIPPED)) == expanded(ANY_GROUP, roles_of(SHIPPED))
