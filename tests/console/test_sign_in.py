"""Who may look: sessions begin with a key or a ticket, end with the key, and cannot be made up."""

from __future__ import annotations

import re
from datetime import timedelta
from time import time

import httpx2
import pytest
from pydantic import SecretStr

from leasehold.api.console import session, tickets
from leasehold.cli import dev
from leasehold.cli.installation import Installation
from leasehold.db.database import Connection
from leasehold.security.credentials import expire_key, revoke_key
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from tests.api.conftest import Running, serving
from tests.api.media_api import problem
from tests.console.conftest import HTML, MakePerson, Person
from tests.console.test_roles import NOBODY
from tests.jobs.conftest import Maker


def cookie_of(person: Person) -> str:
    cookie = person.http.cookies[session.COOKIE]
    assert cookie is not None
    return cookie


async def seen_with(url: str, cookie: str, path: str = "/console/") -> httpx2.Response:
    headers = HTML | {"Cookie": f"{session.COOKIE}={cookie}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=40) as http:
        return await http.get(path)


async def test_without_a_session_a_browser_sees_the_sign_in_page_and_a_program_a_problem(running: Running) -> None:
    async with httpx2.AsyncClient(base_url=running.url, timeout=40) as http:
        page = await http.get("/console/jobs?q=status:failed", headers=HTML)
        assert (page.status_code, "API key" in page.text) == (401, True)
        assert 'value="/jobs?q=status:failed"' in page.text
        problem(await http.get("/console/jobs"), 401, "missing_api_key")


async def test_a_key_opens_the_page_that_was_wanted(running: Running, person: MakePerson) -> None:
    key = (await person()).key
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        answer = await http.post("/console/sign-in", data={"key": f" {key.text}\n", "following": "/jobs?q=x"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs?q=x")
        given = answer.headers["set-cookie"].lower()
        assert {"httponly", "samesite=strict", "path=/console"} <= {part.strip() for part in given.split(";")}
        assert key.text.split("_", 2)[2].lower() not in given
        assert (await http.get("/console/jobs?q=x")).status_code == 200


@pytest.mark.parametrize("following", ["//evil.example/", "https://evil.example/", "/\\evil.example", "jobs", ""])
async def test_signing_in_leads_to_no_other_site(running: Running, person: MakePerson, following: str) -> None:
    key = (await person()).key
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        answer = await http.post("/console/sign-in", data={"key": key.text, "following": following})
    assert answer.headers["location"] == "/console/"


async def test_a_wrong_key_signs_nobody_in(running: Running) -> None:
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        answer = await http.post("/console/sign-in", data={"key": "lh_abcdefghijkl_" + "x" * 43})
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert "The API key is not valid." in answer.text


async def test_a_cookie_that_was_changed_is_no_session(running: Running, person: MakePerson) -> None:
    one, other = await person(), await person()
    cookie = cookie_of(one)
    prefix, began, seen, nonce, signature = cookie.split(".")
    changed = [
        f"{other.key.prefix}.{began}.{seen}.{nonce}.{signature}",
        f"{prefix}.{began}.{int(seen) + 1}.{nonce}.{signature}",
        f"{prefix}.{int(began) + 1}.{seen}.{nonce}.{signature}",
        f"{prefix}.{began}.{seen}.{nonce[::-1]}.{signature}",
        f"{prefix}.{began}.{seen}.{nonce}.{signature[::-1]}",
        "x",
    ]
    assert (await seen_with(running.url, cookie)).status_code == 200
    assert [(await seen_with(running.url, text)).status_code for text in changed] == [401] * len(changed)


def made(settings: Settings, key_prefix: str, began: float, seen: float) -> str:
    """A cookie as the API itself signs it."""
    one = session.Session(key_prefix, int(began), int(seen), "n" * 22)
    return f"{one.text}.{Sealing(settings).sign('console session', one.text.encode())}"


async def test_a_session_ends_when_nobody_looks_and_after_its_longest_time(
    running: Running, person: MakePerson
) -> None:
    prefix, settings, now = (await person()).key.prefix, running.services.settings, time()
    idle = settings.console_session_minutes * 60
    assert (await seen_with(running.url, made(settings, prefix, now - 60, now - idle + 60))).status_code == 200
    assert (await seen_with(running.url, made(settings, prefix, now - idle - 5, now - idle - 5))).status_code == 401
    longest = session.MAX_HOURS * 3600
    assert (await seen_with(running.url, made(settings, prefix, now - longest - 5, now))).status_code == 401
    renewed = await seen_with(running.url, made(settings, prefix, now - 300, now - 120))
    assert f"{int(now - 300)}." in renewed.headers["set-cookie"]


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_session_ends_with_its_key(running: Running, person: MakePerson, rows: Connection, how: str) -> None:
    somebody = await person()
    await (revoke_key(rows, somebody.key.prefix) if how == "revoked" else _expire(rows, somebody.key.prefix))
    running.services.keyring._cache.clear()  # after LEASEHOLD_API_KEY_CACHE_SECONDS
    assert "The API key is not valid." in await somebody.see("/", 401)
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        ticket = tickets.ticket(running.services.settings, somebody.key.prefix, 60)
        assert (await http.get("/console/enter", params={"ticket": ticket})).status_code == 401


async def _expire(rows: Connection, prefix: str) -> None:
    await expire_key(rows, prefix, timedelta(0))


async def test_a_ticket_signs_in_once_it_is_opened_and_not_after_its_time(running: Running, person: MakePerson) -> None:
    prefix, settings = (await person()).key.prefix, running.services.settings
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        ticket = tickets.ticket(settings, prefix, 60)
        answer = await http.get("/console/enter", params={"ticket": ticket, "following": "/jobs"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs")
        assert (await http.get("/console/jobs")).status_code == 200
    old = tickets.ticket(settings, prefix, -1)
    forged = f"{ticket[:-3]}abc"
    foreign = settings.model_copy(update={"sealing_keys": SecretStr("x" * 43 + "=")})
    for wrong in (old, forged, tickets.ticket(foreign, prefix, 60), ""):
        async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
            answer = await http.get("/console/enter", params={"ticket": wrong})
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


async def test_signing_out_ends_the_browsers_session(person: MakePerson) -> None:
    somebody = await person()
    await somebody.send("/sign-out")
    await somebody.see("/", 401)


@pytest.mark.parametrize(
    ("path", "page"),
    [
        (f"/jobs/{NOBODY}/retry", f"/jobs/{NOBODY}"),
        ("/jobs/act", "/jobs"),
        ("/jobs/views/save", "/jobs"),
        ("/to-settle/settle", "/to-settle"),
        ("/keys/abcdefghijkl/revoke", "/keys"),
        (f"/dead-letters/letters/{NOBODY}/replay", "/dead-letters"),
        ("/sign-out", "/"),
    ],
)
async def test_who_acts_after_the_session_ended_hears_that_nothing_was_done_and_comes_back(
    running: Running, path: str, page: str
) -> None:
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        answer = await http.post(f"/console{path}", data={"token": "x"})
    assert (answer.status_code, "nothing was done" in answer.text) == (401, page != "/")
    assert f'name="following" value="{page}"' in answer.text


async def test_a_form_needs_the_token_of_its_own_session(person: MakePerson, maker: Maker, rows: Connection) -> None:
    somebody, another = await person(), await person()
    job_id = await maker.make("run")
    path = f"/console/jobs/{job_id}/cancel"
    for token in ("", "x", await another.token()):
        answer = await somebody.http.post(path, data={"token": token}, headers={"Accept": "*/*"})
        problem(answer, 403, "form_expired")
    foreign = {"Accept": "*/*", "Sec-Fetch-Site": "cross-site"}
    answer = await somebody.http.post(path, data={"token": await somebody.token()}, headers=foreign)
    problem(answer, 403, "foreign_form")
    answer = await somebody.http.post("/console/sign-in", data={"key": somebody.key.text}, headers=foreign)
    problem(answer, 403, "foreign_form")
    assert await rows.fetchval("SELECT cancel IS NULL FROM job WHERE id = $1", job_id)


OWN = "console.example:8000"


async def test_another_site_signs_nobody_in(running: Running, person: MakePerson) -> None:
    """A browser that opens the console without HTTPS sends no Sec-Fetch-Site."""
    cases = [
        ({}, False),  # no browser
        ({"Origin": f"http://{OWN}"}, False),
        ({"Origin": "http://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": ""}, True),
        ({"Origin": "http://console.example"}, True),  # another port is another site
        ({"Origin": "http://console.example", "Host": "console.example:80"}, False),
        ({"Origin": "https://Console.example", "Host": "console.example"}, False),  # HTTPS ends at the proxy
        ({"Origin": "http://console.example:8080", "Host": "console.example"}, False),  # the proxy drops the port
        ({"Origin": "http://[fd00::1]:8080", "Host": "[fd00::1]"}, False),
        ({"Origin": "http://[fd00::1]:8080", "Host": "[fd00::2]"}, True),
        ({"Origin": "http://[fd00::1:8080]", "Host": "[fd00::1]"}, True),
        ({"Origin": "http://evil.example:8080", "Host": "console.example"}, True),
        ({"Origin": "http://console.example.evil.example:8080", "Host": "console.example"}, True),
        ({"Origin": "http://console.example:x", "Host": "console.example"}, True),
        ({"Origin": "http://:8080", "Host": "console.example"}, True),
        ({"Origin": "http://outside.example:8080", "X-Forwarded-Host": "inside, outside.example"}, False),
        ({"Origin": "https://public.example:8443"}, True),  # LEASEHOLD_PUBLIC_URL says the port
        ({"Origin": f"http://evil.example/{OWN}"}, True),
        ({"Origin": f"http://{OWN}.evil.example"}, True),
        ({"Origin": "https://public.example"}, False),  # the proxy has changed Host
        ({"Origin": "https://outside.example", "X-Forwarded-Host": "inside, outside.example"}, False),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}, False),  # the browser has compared
        ({"Origin": f"http://{OWN}", "Sec-Fetch-Site": "same-site"}, True),
    ]
    key = (await person()).key
    public = running.services.settings.model_copy(update={"public_url": "https://public.example/leasehold"})
    async with serving(public) as api, httpx2.AsyncClient(base_url=api.url, timeout=40) as http:
        for headers, is_foreign in cases:
            answer = await http.post("/console/sign-in", data={"key": key.text}, headers={"Host": OWN} | headers)
            assert answer.status_code == (403 if is_foreign else 303), (headers, answer.text)
            assert ("set-cookie" in answer.headers) != is_foreign
        answer = await http.post("/console/sign-in", data={"key": key.text}, headers={"Origin": "null"})
        problem(answer, 403, "foreign_form")
    async with httpx2.AsyncClient(base_url=running.url, timeout=40) as http:  # its public URL is not set
        for host in ("evil.example", OWN):
            headers = {"Host": OWN, "Origin": f"https://{host}"}
            answer = await http.post("/console/sign-in", data={"key": key.text}, headers=headers)
            assert answer.status_code == (303 if host == OWN else 403)


async def test_a_browser_names_the_origin_of_the_consoles_own_forms(running: Running) -> None:
    """With `no-referrer` it sends `null` in place of the origin."""
    async with httpx2.AsyncClient(base_url=running.url, headers=HTML, timeout=40) as http:
        answer = await http.get("/console/sign-in")
    assert answer.headers["referrer-policy"] == "same-origin"


async def test_a_link_from_another_site_opens_its_page(person: MakePerson) -> None:
    """Such a request has no cookie, which is SameSite=Strict: the page asks for itself once more."""
    somebody = await person()
    async with httpx2.AsyncClient(base_url=somebody.http.base_url, headers=HTML, timeout=40) as http:
        answer = await http.get("/console/jobs?q=a&count=true", headers={"Sec-Fetch-Site": "cross-site"})
        assert '<meta http-equiv="refresh" content="0">' in answer.text
        answer = await http.get("/console/jobs?q=a&count=true", headers={"Sec-Fetch-Site": "same-origin"})
        assert "API key" in answer.text


async def test_the_address_that_leasehold_dev_prints_opens_signed_in() -> None:
    async with Installation() as installation:
        address = re.search(r"^console  (\S+)$", dev._welcome_text(installation), re.MULTILINE)
        assert address is not None
        async with httpx2.AsyncClient(headers=HTML, follow_redirects=True, timeout=30) as http:
            page = await http.get(address[1])
            assert (page.status_code, page.url.path, "Sign out" in page.text) == (200, "/console/", True)


async def test_the_console_can_be_elsewhere_or_nowhere(settings: Settings) -> None:
    nowhere = settings.model_copy(update={"console": "off"})
    async with serving(nowhere) as api, httpx2.AsyncClient(base_url=api.url, headers=HTML, timeout=40) as http:
        assert (await http.get("/console/")).status_code == 404
    elsewhere = settings.model_copy(update={"console": "/ops/jobs"})
    async with serving(elsewhere) as api, httpx2.AsyncClient(base_url=api.url, headers=HTML, timeout=40) as http:
        assert (await http.get("/console/")).status_code == 404
        page = await http.get("/ops/jobs/")
        assert (page.status_code, "API key" in page.text) == (401, True)
        answer = await http.post("/ops/jobs/sign-in", data={"key": "x"})
        assert (answer.status_code, "LEASEHOLD_SEALING_KEYS" in answer.text) == (503, True)
