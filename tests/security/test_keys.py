"""A key that was rotated can do what the old one could, for as long, and no more."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from pydantic import ValidationError

from leasehold.db.database import Connection, connect
from leasehold.domain.errors import Invalid, NotFound, TooMany
from leasehold.domain.ids import new_id
from leasehold.limits import keys
from leasehold.limits.downloads import RATES
from leasehold.security.credentials import (
    NewKey,
    PresentedKey,
    StoredKey,
    create_key,
    expire_key,
    find_key,
    find_key_of,
    list_keys,
    mark_used,
    matches,
    parse_key,
    revoke_key,
    rotate_key,
)
from leasehold.settings import Membership, Settings
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.media_api import problem
from tests.api.test_conversion_result import convert, spend
from tests.support.lock_waits import until_waiting

HOUR = timedelta(hours=1)
SCOPES = ("media:read", "runs:write")
BODY = {"content_type": "image/jpeg", "file_name": "a.jpg"}


async def row_of(rows: Connection, prefix: str) -> dict[str, Any]:
    row = await rows.fetchrow("SELECT * FROM api_key WHERE prefix = $1", prefix)
    assert row is not None
    return dict(row)


@pytest.mark.parametrize("overlap", [timedelta(0), HOUR, timedelta(days=400)])
async def test_a_rotated_key_ends_when_its_predecessor_would_have(
    rows: Connection, make_key: MakeKey, overlap: timedelta
) -> None:
    end = datetime.now(UTC) + timedelta(days=30)
    old = await make_key(scopes=SCOPES, expires_at=end)
    new = await row_of(rows, (await rotate_key(rows, old.prefix, overlap=overlap)).prefix)
    assert new["expires_at"] == end
    assert (new["tenant_id"], new["client_id"], tuple(new["scopes"])) == ("acme", "tests", SCOPES)
    assert (await row_of(rows, old.prefix))["expires_at"] <= end


async def test_a_chain_of_rotations_never_outlives_the_first_key(rows: Connection, make_key: MakeKey) -> None:
    end = datetime.now(UTC) + timedelta(days=30)
    key = await make_key(expires_at=end)
    for _ in range(3):
        key = await rotate_key(rows, key.prefix, overlap=timedelta(0))
    assert (await row_of(rows, key.prefix))["expires_at"] == end


async def test_a_key_without_an_end_is_rotated_to_one_without(rows: Connection, make_key: MakeKey) -> None:
    old = await make_key()
    new = await rotate_key(rows, old.prefix, overlap=HOUR)
    assert (await row_of(rows, new.prefix))["expires_at"] is None
    assert (await row_of(rows, old.prefix))["expires_at"] is not None


async def test_a_leaked_key_that_is_on_its_way_out_cannot_be_rotated_into_a_longer_life(
    rows: Connection, make_key: MakeKey
) -> None:
    old = await make_key()
    await rotate_key(rows, old.prefix, overlap=HOUR)
    again = await rotate_key(rows, old.prefix, overlap=timedelta(days=400))
    assert (await row_of(rows, again.prefix))["expires_at"] <= datetime.now(UTC) + HOUR


async def test_of_two_rotations_at_once_with_no_overlap_one_finds_no_key(
    rows: Connection, make_key: MakeKey, settings: Settings
) -> None:
    old = await make_key()
    other = await connect(settings, "test")
    try:
        found = await asyncio.gather(
            rotate_key(rows, old.prefix, overlap=timedelta(0)),
            rotate_key(other, old.prefix, overlap=timedelta(0)),
            return_exceptions=True,
        )
    finally:
        await other.close()
    assert sum(isinstance(one, NotFound) for one in found) == 1


async def test_the_second_of_two_rotations_at_once_gives_a_key_that_ends_with_the_first_overlap(
    rows: Connection, make_key: MakeKey, settings: Settings
) -> None:
    """It has begun before the first has committed, and waits for it."""
    old = await make_key()
    other = await connect(settings, "test")
    try:
        async with rows.transaction():
            await rotate_key(rows, old.prefix, overlap=HOUR)
            second = asyncio.create_task(rotate_key(other, old.prefix, overlap=timedelta(days=400)))
            await until_waiting(rows)
        new = await second
    finally:
        await other.close()
    end = (await row_of(rows, old.prefix))["expires_at"]
    assert end <= datetime.now(UTC) + HOUR
    assert new.expires_at == (await row_of(rows, new.prefix))["expires_at"] == end


async def test_who_changes_a_key_has_its_row_alone(rows: Connection, make_key: MakeKey, settings: Settings) -> None:
    key = await make_key()
    other = await connect(settings, "test")
    try:
        async with rows.transaction():
            await keys.find(rows, key.prefix, "acme")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await other.execute("SELECT FROM api_key WHERE prefix = $1 FOR UPDATE NOWAIT", key.prefix)
    finally:
        await other.close()


async def test_an_expired_key_cannot_be_rotated_back_to_life(rows: Connection, make_key: MakeKey) -> None:
    old = await make_key(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    with pytest.raises(NotFound):
        await rotate_key(rows, old.prefix, overlap=HOUR)


async def test_rotating_a_key_gives_no_new_quota_of_downloads(
    api: Running, rows: Connection, make_key: MakeKey
) -> None:
    scopes = ("conversion:read", "conversion:write")
    old = await make_key(scopes=scopes)
    async with client_of(api.url, old.text) as client:
        path = await convert(client, rows, api)
    await spend(rows, count=RATES[-1][0])  # within a minute: ten seconds may pass on a busy machine
    new = await rotate_key(rows, old.prefix, overlap=HOUR)
    newer = await rotate_key(rows, new.prefix, overlap=HOUR)
    for key, status in ((old, 429), (newer, 429), (await make_key(scopes=scopes), 200)):
        async with client_of(api.url, key.text) as client:
            assert (await client.get(f"{path}/result")).status_code == status


async def test_rotating_a_key_gives_no_new_submissions_a_minute(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    old, stranger = await make_key(), await make_key()
    new = await rotate_key(rows, old.prefix, overlap=HOUR)
    async with serving(settings.model_copy(update={"submissions_per_key": 2})) as api:
        before, after, other = [await api.services.keyring.identify(key.text) for key in (old, new, stranger)]
        charge = api.services.admission.charge
        await charge(rows, before.payer, 2)
        with pytest.raises(TooMany):
            await charge(rows, after.payer)
        await charge(rows, other.payer)


async def test_a_successor_is_refused_once_its_predecessors_end_has_come(
    settings: Settings, rows: Connection, make_key: MakeKey
) -> None:
    old = await make_key(expires_at=datetime.now(UTC) + HOUR)
    new = await rotate_key(rows, old.prefix, overlap=HOUR)
    uncached = settings.model_copy(update={"api_key_cache_seconds": 0.0})
    async with serving(uncached) as api, client_of(api.url, new.text) as client:
        assert (await client.post("/upload-url", json=BODY)).status_code == 201
        await rows.execute("UPDATE api_key SET expires_at = expires_at - interval '1 hour'")
        problem(await client.post("/upload-url", json=BODY), 401, "invalid_api_key")


def test_a_key_is_taken_apart_and_nothing_prints_its_secret() -> None:
    prefix, secret = "abcdefghij01", "S" * 42 + "-"
    plain, of_cell = parse_key(f"lh_{prefix}_{secret}"), parse_key(f"lh_eu1_{prefix}_{secret}")
    assert plain == PresentedKey(prefix, secret)
    assert of_cell == PresentedKey(prefix, secret, "eu1")
    end = datetime.now(UTC)
    stored = StoredKey(new_id(), prefix, prefix, "acme", "tests", frozenset(), True, False, b"S" * 32)
    for shown in (plain, of_cell, NewKey(new_id(), prefix, f"lh_{prefix}_{secret}", end), stored):
        assert prefix in repr(shown)
        assert "SSSS" not in repr(shown)
    text = f"lh_{prefix}_{secret}"
    for malformed in ("", text[:15], f"{text}x", text[:-1], f" {text}", f"{text}\n", f"lh_EU_{prefix}_{secret}"):
        assert parse_key(malformed) is None


async def test_only_the_keys_own_secret_opens_it(rows: Connection, make_key: MakeKey) -> None:
    key, other = await make_key(), await make_key(cell="eu1")
    assert key.text.startswith(f"lh_{key.prefix}_")
    assert other.text.startswith(f"lh_eu1_{other.prefix}_")
    presented, of_other = parse_key(key.text), parse_key(other.text)
    assert presented is not None
    assert of_other is not None
    stored = await find_key(rows, key.prefix)
    assert stored is not None
    assert (stored.id, stored.prefix) == (key.id, key.prefix)
    assert matches(presented, stored)
    assert not matches(of_other, stored)
    assert await find_key(rows, "nobodyhasit0") is None
    assert not matches(presented, None)
    nobodys = "no key has this prefix"  # the text whose hash stands in for a missing row
    assert not matches(PresentedKey(key.prefix, nobodys), None)


async def test_a_key_can_be_used_until_it_ends_or_is_revoked(rows: Connection, make_key: MakeKey) -> None:
    now = datetime.now(UTC)
    endless, ending = await make_key(), await make_key(expires_at=now + HOUR)
    ended, revoked = await make_key(expires_at=now - HOUR), await make_key(expires_at=now + HOUR)
    await revoke_key(rows, revoked.prefix)
    keys = {"endless": endless, "ending": ending, "ended": ended, "revoked": revoked}
    found = {name: await find_key(rows, key.prefix) for name, key in keys.items()}
    assert {name for name, key in found.items() if key is not None and key.usable} == {"endless", "ending"}
    for key in (ended, revoked):  # neither comes back to life
        with pytest.raises(NotFound):
            await rotate_key(rows, key.prefix, overlap=HOUR)
        with pytest.raises(NotFound):
            await expire_key(rows, key.prefix, HOUR)
    with pytest.raises(NotFound):
        await revoke_key(rows, "nobodyhasit0")
    revoked_at = (await row_of(rows, revoked.prefix))["revoked_at"]
    await revoke_key(rows, revoked.prefix)
    assert (await row_of(rows, revoked.prefix))["revoked_at"] == revoked_at
    untouched = [await row_of(rows, key.prefix) for key in (endless, ending)]
    assert [row["revoked_at"] for row in untouched] == [None, None]


async def test_a_key_gets_an_earlier_end_and_never_a_later_one(rows: Connection, make_key: MakeKey) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=1)
    endless, ending, other = await make_key(), await make_key(expires_at=soon), await make_key()
    end = await expire_key(rows, endless.prefix, HOUR)
    assert soon < end <= datetime.now(UTC) + HOUR
    assert (await row_of(rows, endless.prefix))["expires_at"] == end
    assert await expire_key(rows, ending.prefix, HOUR) == soon
    await rotate_key(rows, ending.prefix, overlap=HOUR)
    assert (await row_of(rows, other.prefix))["expires_at"] is None


async def test_the_last_use_of_a_key_is_written_once_a_minute(rows: Connection, make_key: MakeKey) -> None:
    key, other = await make_key(), await make_key()
    used: list[datetime] = []

    async def use(seconds_ago: int | None) -> bool:
        """Whether the key counts as used lately, after its last use so long ago; then it is used."""
        if seconds_ago is not None:
            await rows.execute(
                "UPDATE api_key SET last_used_at = clock_timestamp() - $2::interval WHERE id = $1",
                key.id, timedelta(seconds=seconds_ago),
            )  # fmt: skip
        found = await find_key(rows, key.prefix)
        before = (await row_of(rows, key.prefix))["last_used_at"]
        await mark_used(rows, key.id)
        used.append((await row_of(rows, key.prefix))["last_used_at"])
        assert found is not None
        assert (used[-1] == before) is found.used_lately
        return bool(found.used_lately)

    assert [await use(seconds) for seconds in (None, 0, 30, 90)] == [False, True, True, False]
    assert (await row_of(rows, other.prefix))["last_used_at"] is None


async def test_a_seed_makes_one_key_that_is_shown_again_only_while_it_is_new_and_usable(
    rows: Connection, make_key: MakeKey
) -> None:
    seeds = [bytes([number]) * 32 for number in range(4)]
    plain, of_cell, ending = (
        await make_key(seed=seeds[0]),
        await make_key(seed=seeds[1], cell="eu1"),
        await make_key(seed=seeds[2], expires_at=datetime.now(UTC) + HOUR),
    )
    assert len({plain.text, of_cell.text, ending.text}) == 3
    assert all(parse_key(key.text) is not None for key in (plain, of_cell, ending))
    assert (await make_key()).text != (await make_key()).text

    async def again(number: int, cell: str = "", within: timedelta = HOUR) -> NewKey | None:
        found = await find_key_of(rows, seeds[number], within, cell)
        assert found is not None
        assert found.tenant_id == "acme"
        return found.key

    assert await again(0) == plain
    assert await again(1, "eu1") == of_cell
    assert await again(2) == ending
    assert await again(0, within=timedelta(0)) is None
    assert await find_key_of(rows, seeds[3], HOUR) is None
    await rows.execute("UPDATE api_key SET created_at = created_at - interval '2 hours' WHERE id = $1", plain.id)
    assert await again(0) is None
    await revoke_key(rows, of_cell.prefix)
    assert await again(1, "eu1") is None
    await expire_key(rows, ending.prefix, timedelta(0))
    assert await again(2) is None
    with pytest.raises(asyncpg.UniqueViolationError):
        await make_key(seed=seeds[0])


async def test_keys_are_listed_a_page_at_a_time_each_once_and_ended_ones_when_asked_for(
    rows: Connection, make_key: MakeKey
) -> None:
    now = datetime.now(UTC)
    made = [await make_key(tenant) for tenant in ("acme", "acme", "bolt", "bolt")]
    ended, revoked = await make_key(expires_at=now - HOUR), await make_key(expires_at=now - HOUR)
    await revoke_key(rows, revoked.prefix)

    def prefixes(keys: list[dict[str, Any]]) -> list[str]:
        return [key["prefix"] for key in keys]

    everyone = [key.prefix for key in made]
    assert prefixes(await list_keys(rows)) == everyone
    assert prefixes(await list_keys(rows, "bolt")) == everyone[2:]
    paged: list[str] = []
    after = None
    for _ in range(5):
        page = await list_keys(rows, at_most=1, after=after)
        paged += prefixes(page)
        after = page[0]["id"] if page else after
    assert paged == everyone
    states = {key["prefix"]: key["state"] for key in await list_keys(rows, "acme", ended=True)}
    assert states == {**dict.fromkeys(everyone[:2], "active"), ended.prefix: "expired", revoked.prefix: "revoked"}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"tenant_id": ""}, "key_owner_missing"),
        ({"client_id": ""}, "key_owner_missing"),
        ({"tenant_id": "*"}, "tenant_reserved"),
        ({"scopes": ["runs:read", "runs"]}, "scope_malformed"),
        ({"scopes": ["runs:read\n"]}, "scope_malformed"),
    ],
)
async def test_a_key_without_an_owner_or_with_a_right_that_nobody_understands_is_not_made(
    rows: Connection, wrong: dict[str, Any], code: str
) -> None:
    owner: dict[str, Any] = {"tenant_id": "acme", "client_id": "tests", "scopes": ["runs:read"]}
    with pytest.raises(Invalid) as refused:
        await create_key(rows, **owner | wrong)
    assert refused.value.code == code
    assert await rows.fetchval("SELECT count(*) FROM api_key") == 0
    made = await create_key(rows, **owner)
    assert (await row_of(rows, made.prefix))["tenant_id"] == "acme"


async def test_star_is_no_tenant_at_any_door(settings: Settings, rows: Connection) -> None:
    """It means all tenants. As a tenant it would read the shared chain of the audit, with everybody's refusals."""
    operator = await create_key(rows, tenant_id="ops", client_id="c", scopes=["keys:write", "fleet:operate"])
    async with serving(settings) as api, client_of(api.url, operator.text) as http:
        wish = {"tenant_id": "*", "client_id": "c", "scopes": ["fleet:operate"]}
        problem(await http.post("/v1/keys", json=wish), 422, "tenant_reserved")
        assert (await http.post("/v1/keys", json=wish | {"tenant_id": "**"})).status_code == 201
        # A key that an earlier release made: it works until its end, and has no successor.
        old = await create_key(rows, tenant_id="old", client_id="c", scopes=["fleet:operate"])
        await rows.execute("UPDATE api_key SET tenant_id = '*' WHERE id = $1", old.id)
        problem(await http.post(f"/v1/keys/{old.prefix}/rotate"), 422, "tenant_reserved")
        assert (await row_of(rows, old.prefix))["expires_at"] is None, "the refused rotation has not ended it"
        assert (await http.delete(f"/v1/keys/{old.prefix}")).status_code == 204
    with pytest.raises(ValidationError, match="is no tenant"):
        Settings(_env_file=None, tenant="*")
    with pytest.raises(ValidationError, match="is no tenant"):
        Membership(tenant="*", role="viewer")
