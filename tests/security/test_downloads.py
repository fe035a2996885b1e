"""The downloads of a key: how many at once, how often, and how many bytes. Which rows count, and from when on."""

from __future__ import annotations

import pytest

from leasehold.db.database import Connection
from leasehold.domain.errors import TooMany
from leasehold.domain.ids import new_id
from leasehold.limits import downloads
from leasehold.limits.downloads import begin, end

KEY, TENANT = "key", "acme"
GB = 10**9
HOUR = 3600


async def spend(
    rows: Connection,
    count: int = 1,
    *,
    size: int = 0,
    ago: float = 0.0,
    key: str = KEY,
    tenant: str = TENANT,
    open_until: float | None = None,
) -> None:
    """Downloads that began `ago` seconds ago; below 0: that begin later, so that they leave a short window later.
    `open_until`: they are under way, and lapse in so many seconds.
    """
    for _ in range(count):
        await rows.execute(
            "INSERT INTO download (id, tenant_id, key_prefix, bytes, started_at, lapses_at, finished_at)"
            " VALUES ($1, $2, $3, $4, clock_timestamp() - make_interval(secs => $5),"
            "  clock_timestamp() + make_interval(secs => coalesce($6, 300.0)),"
            "  CASE WHEN $6::float8 IS NULL THEN clock_timestamp() END)",
            new_id(), tenant, key, size, ago, open_until,
        )  # fmt: skip


async def refusal(rows: Connection, size: int = 1) -> TooMany:
    with pytest.raises(TooMany) as refused:
        await begin(rows, TENANT, KEY, size)
    return refused.value


async def test_ten_downloads_are_under_way_at_once_and_no_more(rows: Connection) -> None:
    await spend(rows, 9, ago=120, open_until=60)
    tenth = await begin(rows, TENANT, KEY, 1)
    refused = await refusal(rows)
    assert (refused.code, refused.message, refused.retry_after) == (
        "too_many_at_once",
        "At most 10 downloads at once.",
        5,
    )
    assert refused.headers["RateLimit-Policy"] == '"downloads";q=10'
    await end(rows, TENANT, tenth, 1)  # makes room for one
    await begin(rows, TENANT, KEY, 1)
    assert (await refusal(rows)).code == "too_many_at_once"


@pytest.mark.parametrize(
    "others",
    [{"key": "another"}, {"tenant": "other"}, {"open_until": -1}, {"open_until": None}],
    ids=["another key's", "another tenant's", "of a dead process", "ended"],
)
async def test_at_once_only_the_keys_own_downloads_count_that_are_under_way(
    rows: Connection, others: dict[str, object]
) -> None:
    await spend(rows, 10, **{"ago": 120, "open_until": 60, **others})  # type: ignore[arg-type]  # of several types
    await begin(rows, TENANT, KEY, 1)


@pytest.mark.parametrize(
    ("count", "ago", "sentence", "policy"),
    [
        (5, -30, "At most 5 downloads in 10 seconds.", '"downloads";q=5;w=10'),
        (20, 20, "At most 20 downloads in 60 seconds.", '"downloads";q=20;w=60'),
    ],
)
async def test_a_key_may_begin_so_many_downloads_in_a_time(
    rows: Connection, count: int, ago: int, sentence: str, policy: str
) -> None:
    await spend(rows, count - 1, ago=ago)
    await spend(rows, 30, ago=ago, key="another")
    await spend(rows, 30, ago=ago, tenant="other")
    await spend(rows, 30, ago=61)
    await begin(rows, TENANT, KEY, 1)
    refused = await refusal(rows)
    assert (refused.code, refused.message) == ("too_many_downloads", sentence)
    assert refused.headers["RateLimit-Policy"] == policy
    window = int(policy.rpartition("=")[2])
    assert refused.retry_after is not None
    until_the_oldest_leaves = window - max(ago, 0)
    assert until_the_oldest_leaves - 30 < refused.retry_after <= until_the_oldest_leaves  # the machine may be busy


@pytest.mark.parametrize(
    ("quota", "seconds", "sentence"),
    [(GB, HOUR, "At most 1 GB in 1 hour."), (6 * GB, 24 * HOUR, "At most 6 GB in 24 hours.")],
)
async def test_a_key_may_download_so_many_bytes_in_a_time(
    rows: Connection, quota: int, seconds: int, sentence: str
) -> None:
    ago = seconds - 600
    await spend(rows, size=quota - 10, ago=ago)
    await spend(rows, size=quota, ago=ago, key="another")
    await spend(rows, size=quota, ago=ago, tenant="other")
    await spend(rows, size=quota, ago=seconds + 1)
    download = await begin(rows, TENANT, KEY, 10)
    refused = await refusal(rows)
    assert (refused.code, refused.message) == ("download_quota_exceeded", sentence)
    assert refused.headers["RateLimit-Policy"] == f'"bytes";q={quota};w={seconds}'
    assert refused.retry_after is not None
    assert 500 < refused.retry_after <= 600
    await end(rows, "other", download, 0)  # changes nothing of another tenant's
    assert (await refusal(rows)).code == "download_quota_exceeded"
    await end(rows, TENANT, download, 9)  # what was not sent is given back
    await begin(rows, TENANT, KEY, 1)


async def test_a_result_that_is_larger_than_each_quota_can_be_downloaded_first(rows: Connection) -> None:
    await begin(rows, TENANT, KEY, 7 * GB)
    assert (await refusal(rows)).code == "download_quota_exceeded"


async def test_a_download_counts_as_under_way_a_little_longer_than_it_may_take(rows: Connection) -> None:
    """A process that ends a download at the last moment needs time to say so."""
    download = await begin(rows, TENANT, KEY, 1)
    lapses = await rows.fetchval(
        "SELECT extract(epoch FROM lapses_at - started_at)::float8 FROM download WHERE id = $1", download
    )
    assert lapses == pytest.approx(downloads.MAX_SECONDS + 10, abs=0.5)
    assert downloads.MAX_SECONDS == 300
