"""Values that no page of the console sends end in an answer that names them, and never in an error of the server."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from structlog.testing import capture_logs

from leasehold.api.console import session
from leasehold.api.console.rendering import FLASH
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.security.sealing import Unsealable
from tests.api.media_api import problem
from tests.console.conftest import MakePerson
from tests.jobs.conftest import Maker

NO_JOB = "01a1fb52-86fe-7471-a0ae-c754b8f77f84"


@pytest.mark.parametrize(
    "path",
    [
        "/audit?since=0001-01-01T00:00:00%2B14:00",
        "/audit?until=9999-12-31T23:59:59-14:00",
    ],
)
async def test_an_instant_beyond_the_calendar_is_refused(person: MakePerson, path: str) -> None:
    assert "invalid_request" in await (await person()).see(path, 422)


@pytest.mark.parametrize("content", [b"5", b"null", b"[1]", b'[true, {"a": 1}]', b"[true, 2]", b"{}", b"no JSON"])
async def test_a_sentence_that_the_api_did_not_write_is_not_shown(person: MakePerson, content: bytes) -> None:
    somebody = await person()
    cookie = f"{session.COOKIE}={somebody.http.cookies[session.COOKIE]}; {FLASH}="
    headers = {"Cookie": cookie + base64.urlsafe_b64encode(content).decode()}
    answer = await somebody.http.get("/console/jobs", headers=headers)
    assert (answer.status_code, 'class="flash' in answer.text) == (200, False)


@pytest.mark.parametrize(
    ("back", "location"),
    [
        ("/jobs?q=tag.name:中", "/console/jobs?q=tag.name:%E4%B8%AD"),
        ("/jobs?q=status%3Afailed&cursor=x", "/console/jobs?q=status%3Afailed&cursor=x"),
        ("/jobs\r\nX-Other: 1", "/console/"),
        ("//other.example/", "/console/"),
        ("/\\other.example", "/console/"),
        ("jobs", "/console/"),
        ("", "/console/"),
    ],
)
async def test_a_form_leads_back_to_a_page_of_the_console_alone(
    person: MakePerson, maker: Maker, back: str, location: str
) -> None:
    somebody, job = await person(), str(await maker.make("run"))
    answer = await somebody.send("/jobs/act", action="cancel", job=job, back=back)
    assert (answer.status_code, answer.headers["location"]) == (303, location)
    refused = await somebody.send("/jobs/act", action="no act", job=job, back=back)
    if location == "/console/":
        assert (refused.status_code, "Pick jobs" in refused.text) == (422, True)
    else:
        assert (refused.status_code, refused.headers["location"]) == (303, location)


@pytest.mark.parametrize(("typed", "stored"), [("000000005", 5), ("0000000005", None), ("1234567890", None)])
async def test_a_number_in_a_form_is_read_whole_or_refused(
    person: MakePerson, rows: Connection, typed: str, stored: int | None
) -> None:
    answer = await (await person()).send("/limits/set", key="tenant", at_most=typed)
    assert answer.status_code == (422 if stored is None else 303)
    assert await rows.fetchval("SELECT at_most FROM gate WHERE declared") == stored


@pytest.mark.parametrize("kind", [LookupError, Unsealable])
async def test_a_bug_is_a_page_with_the_id_of_its_request(
    person: MakePerson, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """A browser got the JSON of the problem. A program still gets it."""
    somebody = await person()

    async def fail(*_args: object, **_more: object) -> None:
        raise kind("nobody foresaw this")

    monkeypatch.setattr("leasehold.api.console.jobs.list_page", fail)
    with capture_logs() as lines:
        answer = await somebody.http.get("/console/jobs")
    assert [line["error"] for line in lines if line["event"] == "request failed unexpectedly"] == [kind.__name__]
    assert (answer.status_code, answer.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert f'data-copy="{answer.headers["x-request-id"]}"' in answer.text
    assert "Sign out" in answer.text
    assert "nobody foresaw this" not in answer.text
    problem(await somebody.http.get("/console/jobs", headers={"Accept": "*/*"}), 500, "internal_error")


async def test_a_key_lives_as_long_as_was_typed_or_is_not_made(person: MakePerson, rows: Connection) -> None:
    """Seven digits of days were once cut to six."""
    somebody = await person()
    answer = await somebody.send("/keys/new", client_id="cut", role="viewer", days="0000030")
    assert (answer.status_code, "lh_" in answer.text) == (200, True)
    days = await rows.fetchval("SELECT expires_at - created_at FROM api_key WHERE client_id = 'cut'")
    assert round(days.total_seconds() / 86_400) == 30


async def test_a_form_gives_no_key_an_end_that_was_not_typed(person: MakePerson, rows: Connection) -> None:
    """Zero days once made a key without an end, and an empty field once ended a key at once."""
    admin = await person()
    assert (await admin.send("/keys/new", client_id="zero", role="viewer", days="0")).status_code == 422
    assert await rows.fetchval("SELECT count(*) FROM api_key WHERE client_id = 'zero'") == 0
    key = await create_key(rows, tenant_id="acme", client_id="kept", scopes=["jobs:read"])
    for act in ("expire", "rotate"):
        assert (await admin.send(f"/keys/{key.prefix}/{act}", days=" ", hours="")).status_code == 422
    assert await rows.fetchval("SELECT expires_at FROM api_key WHERE client_id = 'kept'") is None
    assert (await admin.send(f"/keys/{key.prefix}/expire", days="0")).status_code == 303
    assert await rows.fetchval("SELECT expires_at <= now() FROM api_key WHERE client_id = 'kept'")


async def test_a_schedule_in_an_unknown_time_zone_hides_no_other(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    await maker.make("run")  # writes the template
    for zone in ("Europe/Berlin", "Asia/Tokyo"):
        body = {"template": "outside", "cron": "0 9 * * *", "timezone": zone}
        assert (await maker.client.post("/v1/schedules", json=body)).status_code == 201
    await rows.execute("UPDATE schedule SET timezone = 'Nowhere/Gone' WHERE timezone = 'Asia/Tokyo'")
    page = await (await person()).see("/schedules")
    assert ("Europe/Berlin" in page, "Nowhere/Gone" in page) == (True, True)


async def test_a_job_with_a_callback_url_without_a_readable_host_is_shown(
    person: MakePerson, maker: Maker, rows: Connection
) -> None:
    """An earlier release took such URLs."""
    job_id = await maker.make("run", callback_url="https://example.com/")
    await rows.execute("UPDATE job_callback SET url = 'https://a[b/'")
    page = await (await person()).see(f"/jobs/{job_id}")
    assert "<dt>Callback</dt><dd>an unreadable host" in page


async def test_a_list_of_keys_continues_until_every_key_was_listed_once(maker: Maker, rows: Connection) -> None:
    for number in range(7):
        await create_key(rows, tenant_id="acme", client_id=f"client {number % 3}", scopes=["jobs:read"])
    await create_key(rows, tenant_id="other", client_id="client 1", scopes=["jobs:read"])
    expected = [key["prefix"] for key in (await maker.client.get("/v1/keys")).json()["keys"]]
    assert len(expected) == 8
    for limit in (1, 3, 8):
        listed: list[str] = []
        query: dict[str, Any] = {"limit": limit}
        while True:
            page = (await maker.client.get("/v1/keys", params=query)).json()
            assert 0 < len(page["keys"]) <= limit
            listed += [key["prefix"] for key in page["keys"]]
            if page["next_cursor"] is None:
                break
            query["cursor"] = page["next_cursor"]
        assert listed == expected


async def test_a_key_with_several_roles_shows_the_strongest(maker: Maker, rows: Connection) -> None:
    scopes = ["role:viewer", "role:admin", "role:of-a-later-release", "jobs:read"]
    key = await create_key(rows, tenant_id="acme", client_id="several", scopes=scopes)
    keys = (await maker.client.get("/v1/keys")).json()["keys"]
    (shown,) = [one for one in keys if one["prefix"] == key.prefix]
    assert (shown["role"], shown["scopes"]) == ("admin", ["jobs:read"])
