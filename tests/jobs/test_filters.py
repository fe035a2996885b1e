"""Each term of the filter finds its jobs and no others, in bounded reads, within the tenant."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest

from bench.surface import rows_read
from leasehold.db import job_lists, job_reads
from leasehold.db.database import Connection, in_index_order
from leasehold.db.job_lists import Listing, Scope
from leasehold.db.job_reads import DeadLetterFilter
from leasehold.domain.ids import new_id
from leasehold.domain.job_filter import JobFilter, parse
from leasehold.domain.states import JobState
from tests.api.media_api import problem
from tests.jobs.conftest import KINDS, TENANT_SCOPES, MakeClient, Maker
from tests.jobs.test_jobs import ids
from tests.unit.test_job_filter import NOW

WORKER = str(uuid4())
#: A term of every sort; each with a status, a template or a kind beside it, below.
TERMS = (
    "", "status:failed", "status:cancelled", "status:running", "status:succeeded", "queue:q", "template:outside",
    "code:broken", "tag.customer:7", "created:<1h", "created:>1h", "waited:>1s", "duration:>1s", f"worker:{WORKER}",
    f"schedule:{uuid4()}", "payload./n:1", "text", str(uuid4()),
)  # fmt: skip


async def test_each_term_finds_its_jobs(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient, rows: Connection
) -> None:
    made = {kind: str(await maker.make(kind)) for kind in KINDS}
    tagged = str(await maker.make("run", tags={"customer": "7", "region": "eu"}, payload={"a": {"b/c": 7}, "on": True}))
    other = str(await maker.make("run", tags={"customer": "70"}, scope_id="Paris", priority="low"))
    await maker.fail(UUID(tagged), "step_timeout")
    claimed = await maker.claim(UUID(made["media"]))
    await rows.execute(
        "UPDATE job SET created_at = created_at - interval '1 hour', started_at = created_at - interval '1 hour'"
        " WHERE id = $1",
        UUID(other),
    )
    everything = {*made.values(), tagged, other}
    cases = {
        "": everything,
        "kind:run": {made["run"], tagged, other},
        "template:outside status:failed": {tagged},
        "template:outside": {made["run"], tagged, other},
        "template:media": {made["media"]},
        "queue:q": {made["run"], tagged, other},
        "queue:webhooks": {made["webhook"]},
        "code:step_timeout": {tagged},
        "code:step_timeout kind:media": set(),
        "tag.customer:7": {tagged},
        "tag.customer:7 tag.region:eu": {tagged},
        "tag.customer:7 tag.region:us": set(),
        "tag.customer:70": {other},
        "created:<30m": everything - {other},
        "created:>30m": set(),
        "created:>0s": everything,
        "created:>2026-01-01": everything,
        "created:<2026-01-01": set(),
        "waited:>30m": set(),
        "duration:>30m": {other},
        f"worker:{claimed.lease.owner}": {made["media"]},
        "payload./a/b~1c:7": {tagged},
        "payload./on:true": {tagged},
        "payload./a/b~1c:8": set(),
        '"did not work"': {tagged},
        "paris": {other},
        other: {other},
        f"{other} kind:media": set(),
        f"schedule:{uuid4()}": set(),
        "tenant:acme kind:media": {made["media"]},
        "tenant:other": set(),
    }
    stranger = await client_with(*TENANT_SCOPES, tenant="other")
    for q, found in cases.items():
        assert set(await ids(client, q)) == found, q
        assert await ids(stranger, q) == [], q
        answer = await client.get("/v1/jobs", params={"q": q, "count": True})
        assert answer.json()["count"] == {"n": len(found), "exact": True}, q


async def test_of_a_date_its_first_instant_counts_as_later(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection
) -> None:
    runs = {days: await maker.make("run") for days in (0, 1)}
    midnight = "date_trunc('day', created_at, 'UTC') + $2 * interval '1 day'"
    for days, run in runs.items():
        await rows.execute(f"UPDATE job SET created_at = {midnight} WHERE id = $1", run, days)
    day = await rows.fetchval("SELECT created_at FROM job WHERE id = $1", runs[0])
    this, next_ = day.date(), day.date() + timedelta(days=1)
    assert set(await ids(client, f"created:>{this}")) == {str(run) for run in runs.values()}
    assert await ids(client, f"created:<{next_}") == [str(runs[0])]


async def test_every_kind_takes_tags(maker: Maker, client: httpx2.AsyncClient) -> None:
    made = {str(await maker.make(kind, tags={"order": "4711"})) for kind in KINDS if kind != "webhook"}
    assert set(await ids(client, "tag.order:4711")) == made
    batch = {"template": "outside", "runs": [{"tags": {"n": "1"}}, {"tags": {"n": "2"}}, {}]}
    batched = (await client.post("/v1/runs/batch", json=batch)).json()["ids"]
    assert [await ids(client, f"tag.n:{n}") for n in (1, 2)] == [[batched[0]], [batched[1]]]


@pytest.mark.parametrize(
    "tags",
    [{"A": "1"}, {"a": ""}, {"a": "x" * 65}, {"a" * 65: "1"}, {"a": 1}, {"é": "1"}, {f"t{n}": "1" for n in range(9)}],
)
async def test_wrong_tags_are_refused(client: httpx2.AsyncClient, tags: dict[str, Any]) -> None:
    problem(await client.post("/v1/runs", json={"template": "t", "tags": tags}), 422, "invalid_request")


async def test_an_error_names_its_character(client: httpx2.AsyncClient) -> None:
    for q, position in (("kind:media statuss:failed", 12), ("kind:nothing", 1)):
        said = problem(await client.get("/v1/jobs", params={"q": q}), 422, "invalid_filter")
        assert said["errors"][0]["position"] == position


async def test_a_filter_that_would_read_too_much_says_so(
    maker: Maker, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [str(await maker.make("run")) for _ in range(5)]
    monkeypatch.setattr(job_lists, "MAX_READ", 3 * 3)
    for q, position in (("kind:run duration:>1h", 1), ("waited:>1h", 1)):
        said = problem(await client.get("/v1/jobs", params={"q": q}), 422, "filter_too_broad")
        assert said["errors"][0]["position"] == position
    page = (await client.get("/v1/jobs", params={"q": "waited:<1h", "limit": 3})).json()
    assert [job["id"] for job in page["jobs"]] == made[:1:-1]  # a page that is full reads no further
    assert (await client.get("/v1/jobs", params={"q": "waited:>1h", "count": True})).status_code == 422


async def test_a_search_says_how_far_it_came_and_goes_on(
    maker: Maker, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [str(await maker.make("run", payload={"n": n})) for n in range(5)]
    monkeypatch.setattr(job_lists, "MAX_SEARCHED", 2)
    for n, job_id in enumerate(made):
        assert await search(client, f"payload./n:{n}") == ([job_id], 3)
    assert await search(client, "nothing") == ([], 1), "no job can have this text"
    scoped = [str(await maker.make("run", scope_id=f"s{n}")) for n in range(5)]
    for n, job_id in enumerate(scoped):
        assert await search(client, f"S{n}") == ([job_id], 3)
    assert await search(client, "nothing") == ([], 3)


async def test_a_search_by_queue_says_how_far_it_came_and_goes_on(
    maker: Maker, client: httpx2.AsyncClient, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [str(await maker.make("run")) for _ in range(5)]
    await rows.execute("UPDATE task SET queue = 'rare' WHERE job_id = ANY($1::uuid[])", [made[0], made[3]])
    monkeypatch.setattr(job_lists, "MAX_READ_BY_QUEUE", 2 * 5)  # two jobs, each with the rows of its steps
    assert await search(client, "queue:rare") == ([made[3], made[0]], 3)
    assert await search(client, "queue:nowhere") == ([], 3)
    assert await search(client, "queue:rare waited:<1d kind:run") == ([made[3], made[0]], 3)
    counted = (await client.get("/v1/jobs", params={"q": "queue:rare", "count": True})).json()
    assert counted["count"] == {"n": 2, "exact": True}


async def test_a_page_by_queue_reads_few_rows_however_many_jobs_are_in_other_queues(rows: Connection) -> None:
    await rows.execute(
        "WITH made AS (INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq,"
        " params, inputs, output_prefix, finished_at) SELECT gen_random_uuid(), 'acme', 'noop', 1, 'succeeded', 0, 1,"
        " '{}', '{}', 'x', now() FROM generate_series(1, 6000) RETURNING id)"
        " INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, finished_at)"
        " SELECT gen_random_uuid(), id, 'acme', 's' || n, n, 'q', 1, 'succeeded', 1, now()"
        " FROM made CROSS JOIN generate_series(1, 4) AS n"
    )
    await rows.execute("ANALYZE job; ANALYZE task")
    scope = Scope("acme", (), True, ("noop",), ())
    for q in ("queue:nowhere", "queue:nowhere created:<1h", "queue:nowhere status:succeeded"):
        listing = job_lists.listing_of_page(scope, parse(q, datetime.now(UTC)))
        assert (await job_lists.page(rows, listing, 50)).ended_at is not None
        assert 1000 < await rows_read(rows, listing) <= 5010


async def test_a_text_finds_a_job_wherever_it_has_it(maker: Maker, client: httpx2.AsyncClient) -> None:
    for _ in range(3):
        await maker.make("run")
    broken, scoped = str(await maker.make("run")), str(await maker.make("run", scope_id="Customer Nine"))
    keyed = str(await maker.make("run", dedupe={"key": "invoice-7"}))
    picture, failed = str(await maker.make("media")), str(await maker.make("conversion"))
    await maker.fail(UUID(broken), "card_refused")
    await maker.fail(UUID(failed))
    for q, found in (
        ("card_REFUSED", [broken]),
        ("did", [failed, broken]),  # It did not work.
        ("nine", [scoped]),
        ("voice-7", [keyed]),
        ("Media", [picture]),
        ("media did", []),
        ("conversion did", [failed]),
        ('"outside outside"', [keyed, scoped, broken]),
        ("outside status:failed", [broken]),
        (f"{scoped} nine", [scoped]),
        ("kind:conversion not", [failed]),
    ):
        jobs = await search(client, q)
        assert [job for job in jobs[0] if job in (broken, scoped, keyed, picture, failed)] == found, q
    assert len((await search(client, "outside"))[0]) == 6


async def test_a_uuid_is_a_jobs_id_and_otherwise_a_text(
    maker: Maker, client: httpx2.AsyncClient, client_with: MakeClient
) -> None:
    user, order = str(uuid4()), str(uuid4())
    scoped = [str(await maker.make("run", scope_id=user)) for _ in range(2)]
    keyed = str(await maker.make("run", dedupe={"key": order}))
    await maker.make("run", scope_id=scoped[0])
    assert await search(client, user) == (scoped[::-1], 1)
    assert await search(client, user.upper()) == (scoped[::-1], 1)
    assert await search(client, order) == ([keyed], 1)
    assert await search(client, scoped[0]) == ([scoped[0]], 1), "a job has this id"
    assert await search(client, f"{user} {order}") == ([], 1)
    assert await search(client, str(uuid4())) == ([], 1)
    answer = (await client.get("/v1/jobs", params={"q": user, "count": True})).json()
    assert answer["count"] == {"n": 2, "exact": True}
    stranger = await client_with(*TENANT_SCOPES, tenant="other")
    assert await search(stranger, user) == await search(stranger, scoped[0]) == ([], 1)


async def test_a_text_in_very_many_names_walks_over_all_jobs(
    maker: Maker, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = str(await maker.make("run"))
    monkeypatch.setattr(job_lists, "_MAX_PIPELINES_WITH_TEXT", 0)
    assert await search(client, "outside") == ([made], 1)


async def search(client: httpx2.AsyncClient, q: str) -> tuple[list[str], int]:
    """What all pages found, and how many there were."""
    found, pages = [], 0
    cursor: dict[str, str] = {}
    while True:
        body = (await client.get("/v1/jobs", params={"q": q} | cursor)).json()
        found += [job["id"] for job in body["jobs"]]
        pages += 1
        if body["next_cursor"] is None:
            return found, pages
        assert body["searched_back_to"]
        cursor = {"cursor": body["next_cursor"]}


def filters() -> list[JobFilter]:
    beside = ("", " status:failed", " kind:media", " template:t", " queue:q", " created:<1h")
    texts = {f"{term}{more}".strip() for term in TERMS for more in beside}
    return [parse(text, NOW) for text in sorted(texts) if text.count("status:") < 2 and text.count("queue:") < 2
            and text.count("template:") < 2 and text.count("created:") < 2]  # fmt: skip


SCOPES = (
    Scope("acme", ("conversion", "media"), runs=True, others=("noop",), owned=("conversion", "media", "webhook")),
    Scope("acme", ("media",), runs=False, others=("noop",), owned=("conversion", "media", "webhook")),
)


def test_every_statement_names_the_tenant_wherever_it_finds_jobs() -> None:
    """Generated: all terms, beside one another. What drives the walk names the tenant itself, and so does each job."""
    statements = [
        statement
        for scope in SCOPES
        for wanted in filters()
        for before in (None, new_id())
        for plain in [Listing(scope, wanted, before)]
        for listing in (plain, plain.narrowed_to_pipelines(["report", "media"]), plain.with_ids_as_texts())
        for statement in (listing.page(50), listing.count(), listing.estimate())
    ]
    assert len(statements) > 900
    for statement in statements:
        assert statement.values[0] == "acme"
        assert "j.tenant_id = $1::text" in statement.text
        for table, alias in re.findall(r"FROM (job|run|job_tag|task) (x|t) WHERE", statement.text):
            if f"{alias}.job_id = j.id" in statement.text and alias == "t":
                continue
            assert f"{alias}.tenant_id = $1::text" in statement.text, (table, statement.text)


def test_a_search_asks_for_the_names_of_pipelines_only_if_they_change_the_walk() -> None:
    for scope in SCOPES:
        for wanted in filters():
            plain = Listing(scope, wanted)
            names_count = "text" in wanted.texts and plain.narrowed_to_pipelines(["a"]).page(50) != plain.page(50)
            assert plain.searchable_text == ("text" if names_count and wanted.template is None else None), wanted


async def test_postgresql_takes_every_statement(rows: Connection) -> None:
    """Generated: also those of an operator, with no tenant, and those of a caller who may see no job."""
    operator = Scope(None, ("media",), runs=True, others=(), owned=("media", "webhook"))
    scopes = (*SCOPES, operator, Scope("acme", (), runs=False, others=("noop",), owned=("media", "webhook")))
    for scope in scopes:
        for wanted in filters():
            plain = Listing(scope, wanted, new_id())
            named = [plain.narrowed_to_pipelines(["report", "media"])] if plain.searchable_text is not None else []
            for listing in (plain, *named):
                for statement in (listing.page(50), listing.count(), listing.estimate()):
                    await rows.prepare(statement.text)


def test_every_status_is_a_term() -> None:
    assert {parse(f"status:{state}", NOW).status for state in JobState} == set(JobState)


@pytest.mark.parametrize("q", ["schedule:{schedule}", "tag.customer:7", "code:broken", "status:failed"])
async def test_a_page_of_thousands_reads_no_more_than_it_shows(rows: Connection, q: str) -> None:
    """The planner would read all that the index finds, and sort it."""
    schedule = uuid4()
    await rows.execute(
        "WITH made AS (INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq,"
        " params, inputs, output_prefix, error, finished_at) SELECT gen_random_uuid(), 'acme', 'report', 1,"
        " CASE WHEN n % 4 = 0 THEN 'failed' ELSE 'succeeded' END, 0, 1, '{}', '{}', 'x',"
        ' CASE WHEN n % 4 = 0 THEN \'{"code": "broken"}\'::jsonb END, now() FROM generate_series(1, 12000) AS n'
        " RETURNING id, error), runs AS (INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id,"
        " schedule_id) SELECT id, 'acme', 'report', 1, 'tenant', '', CASE WHEN error IS NOT NULL THEN $1::uuid END"
        " FROM made) INSERT INTO job_tag (job_id, name, tenant_id, value) SELECT id, 'customer', 'acme', '7' FROM made"
        " WHERE error IS NOT NULL",
        schedule,
    )
    await rows.execute("ANALYZE job; ANALYZE run; ANALYZE job_tag")
    listing = Listing(Scope("acme", (), True, (), ()), parse(q.format(schedule=schedule), datetime.now(UTC)))
    assert len((await job_lists.page(rows, listing, 50)).rows) == 50
    assert 50 < await rows_read(rows, listing) < 500


async def test_a_page_of_dead_letters_reads_no_more_than_it_shows_or_searches(
    rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overview asks for a hundred each ten seconds."""
    await rows.execute(
        "WITH made AS (INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq,"
        " params, inputs, output_prefix, error, finished_at) SELECT gen_random_uuid(), 'acme', 'report', 1, 'failed',"
        " 0, 1, '{}', '{}', 'x', '{}', now() - n * interval '1 second' FROM generate_series(1, 4000) AS n"
        " RETURNING id, finished_at), runs AS (INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id)"
        " SELECT id, 'acme', 'report', 1, 'tenant', '' FROM made), tasks AS (INSERT INTO task (id, job_id, tenant_id,"
        " step, position, queue, priority, status, max_attempts, finished_at) SELECT id, id, 'acme', 'only', 0, 'q', 1,"
        " 'failed', 1, finished_at FROM made) INSERT INTO failure (task_id, epoch, cause, code, message, retryable, at)"
        " SELECT id, 1, 'error', 'broken', 'no', false, finished_at FROM made"
    )
    await rows.execute("ANALYZE job; ANALYZE run; ANALYZE task; ANALYZE failure")
    every = DeadLetterFilter(runs=True, pipelines=(), owned=())
    before = await fetched(rows)
    page = await job_reads.dead_letters(rows, "acme", every, limit=100)
    assert len(page) == 100
    assert await fetched(rows) - before < 600
    at, task_id = page[-1]["at"], page[-1]["task_id"]
    following = await job_reads.dead_letters(rows, "acme", every, before=(at, task_id), limit=100)
    newest_first = [row["at"] for row in [*page, *following]]
    assert newest_first == sorted(newest_first, reverse=True)
    assert len({row["task_id"] for row in [*page, *following]}) == 200
    monkeypatch.setattr(job_reads, "MAX_SEARCHED", 100, raising=False)
    before = await fetched(rows)
    assert not await job_reads.dead_letters(rows, "acme", replace(every, code="another"), limit=100)
    assert not await job_reads.dead_letters(rows, "acme", every, fingerprint="another", limit=100)
    assert await fetched(rows) - before < 1200


async def test_dead_letters_behind_many_others_are_on_some_page_and_are_replayed(
    maker: Maker, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_reads, "MAX_SEARCHED", 2, raising=False)
    failed = [await maker.make("media") for _ in range(7)]
    for number, job_id in enumerate(failed):
        await maker.fail(job_id, "rare" if number < 3 else "common")
    listed, query = list[str](), {"code": "rare", "limit": "2"}
    for _ in range(10):
        answer = (await client.get("/v1/dead-letters", params=query)).json()
        listed += [letter["job_id"] for letter in answer["dead_letters"]]
        if answer["next_cursor"] is None:
            break
        query["cursor"] = answer["next_cursor"]
    rare = [str(job_id) for job_id in reversed(failed[:3])]
    assert (listed, answer["next_cursor"]) == (rare, None)
    replayed = await client.post("/v1/dead-letters/replay", json={"code": "rare", "limit": 2})
    assert replayed.json()["replayed"] == rare[:2]
    replayed = await client.post("/v1/dead-letters/replay", json={"code": "rare"})
    assert replayed.json()["replayed"] == rare[2:]


async def fetched(rows: Connection) -> int:
    """Rows of tables that this database has read until now."""
    await rows.execute("SELECT pg_stat_force_next_flush()")
    await rows.execute("SELECT pg_stat_clear_snapshot()")
    found: int = await rows.fetchval(
        "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables"
    )
    return int(found)


async def test_a_statement_after_a_page_of_the_same_transaction_is_planned_as_before_it(rows: Connection) -> None:
    async with rows.transaction():
        async with in_index_order(rows):
            assert await rows.fetchval("SHOW enable_sort") == "off"
        assert await rows.fetchval("SHOW enable_sort") == "on"
        assert await rows.fetchval("SHOW enable_bitmapscan") == "on"
