"""A key that was rotated can do what the old one could, for as long, and no more."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasehold.db.database import Connection, connect
from leasehold.domain.errors import NotFound, TooMany
from leasehold.limits.downloads import RATES
from leasehold.security.credentials import rotate_key
from leasehold.settings import Settings
from tests.api.conftest import MakeKey, Running, client_of, serving
from tests.api.media_api import problem
from tests.api.test_conversion_result import convert, spend

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
