"""Every operation that names a thing, sent about the things of another tenant: none is there, and none changes.

The operations are those of the contract: one that is added is tried, too. The things are made as for the fuzzer.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from leasehold.api.app import make_app
from leasehold.api.auth import security
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of
from tests.api.fuzz_things import SWITCHED, TEMPLATE, WORKER, Subject, Things
from tests.api.test_contract import client, everything, things

__all__ = ["client", "everything", "things"]

#: Of a tenant. What operators may do, they may do to all tenants.
SCOPES = {value for name, value in vars(security).items() if name.isupper() and ":" in str(value)} - {security.OPERATE}
APP = make_app(Settings(_env_file=None))
DOCUMENT = APP.openapi()
#: operation -> (method, path)
OPERATIONS = {
    operation["operationId"]: (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
}
OURS = {name: of for name, of in OPERATIONS.items() if security.OPERATE not in APP.state.scopes[of[1], of[0]]}
#: Members that a body must have beside those that name something.
MORE: dict[str, dict[str, Any]] = {
    "progressExternal": {"percent": 1},
    "logExternal": {"first": 1, "lines": [{"message": "a"}]},
    "emitExternal": {"first": 1, "chunks": ["a"]},
    "announceExternalFiles": {"files": [{"name": "a.txt", "content_type": "text/plain", "size": 1}]},
    "createRuns": {"runs": [{}]},
    "createTemplate": {"type": "another", "steps": [{"id": "only"}]},
    "changeWebhook": {"enabled": False},
    "enableTemplate": {"enabled": False},
    "retryRun": {"from_step": "only"},
    "promoteConversion": {"targets": [{"artifact": "nef", "key": "a/out.nef"}]},
    "claimExternal": {"worker_id": WORKER},
    "signalRun": {"name": None, "payload": 1},
}
#: What names nothing that somebody has; and what finds nothing of its own and says so.
NAMELESS = frozenset({"createUploadUrl", "createWebhook", "createOperation", "generateImages", "generateVideo"})
#: What the fuzzer asks of things that are not there: a log and a stream that go on have no end to wait for.
LOGS = frozenset({"readRunLogs", "readRunStream", "readJobLogs", "readJobStream"})
NOTHING: dict[str, tuple[int, str]] = {
    "claimExternal": (200, '"tasks":[]'),
    "replayDeadLetters": (202, '"replayed":[]'),
    "listJobs": (200, '"jobs":[]'),
    "listDeadLetters": (200, '"dead_letters":[]'),
} | dict.fromkeys(("queryImages", "postImagesQuery", "queryVideo", "postVideoQuery"), (200, '"status_text":"unknown"'))
#: Lists that count, and name nothing.
COUNTS = (
    "/v1/generations/statistics", "/v1/dead-letters/groups", "/v1/tenants/usage", "/v1/keys", "/v1/unsettled",
    "/v1/audit", "/v1/audit/export",
)  # fmt: skip
#: Answers of other tenants to a worker that names a task which is not there: as if its lease had ended.
LOST = frozenset({
    "heartbeatExternal", "progressExternal", "completeExternal", "failExternal", "announceExternalFiles",
    "acknowledgeCancelExternal", "logExternal", "emitExternal", "releaseExternal",
})  # fmt: skip


def about_of(acme: Things, name: str) -> Subject:
    if name in LOGS:
        return Subject(path=dict.fromkeys(("run_id", "job_id"), acme.cancelled()))
    return acme.about(name)


def request_of(name: str, about: Subject) -> dict[str, Any]:
    method, path = OPERATIONS[name]
    named = dict.fromkeys(re.findall(r"\{(\w+)", path), str(uuid4())) | about.path  # or what the fuzzer cannot make
    body = about.body | MORE.get(name, {})
    sent: dict[str, Any] = {"method": method.upper(), "url": path.format(**named), "params": about.query}
    if method != "get" and (body or "requestBody" in DOCUMENT["paths"][path][method]):
        sent["json"] = {key: value for key, value in body.items() if value is not None}
    return sent


async def fingerprint(rows: Connection, tenant: str) -> dict[str, str]:
    """What the tenant has, by table."""
    tables = await rows.fetch(
        "SELECT c.table_name AS name FROM information_schema.columns c JOIN information_schema.tables t"
        " USING (table_schema, table_name) WHERE c.column_name = 'tenant_id' AND t.table_type = 'BASE TABLE'"
        " AND table_schema = 'public' AND table_name <> 'api_key'"
    )
    of_each = " UNION ALL ".join(
        f"SELECT '{table['name']}', md5(string_agg(x::text, '|' ORDER BY x::text)) FROM {table['name']} x"
        " WHERE tenant_id = $1"
        for table in tables
    )
    return {row[0]: row[1] for row in await rows.fetch(of_each, tenant)}


async def names_of(rows: Connection, tenant: str) -> set[str]:
    """The ids of what the tenant has, and the names of its templates."""
    found = {TEMPLATE, SWITCHED}
    for table in ("job", "task", "schedule", "webhook", "media", "person", "saved_view"):
        found |= {str(row["id"]) for row in await rows.fetch(f"SELECT id FROM {table} WHERE tenant_id = $1", tenant)}
    return found


async def answer_of(http: httpx2.AsyncClient, sent: dict[str, Any]) -> tuple[int, str]:
    """The answer; of one that does not end (a stream) its beginning."""
    async with http.stream(**sent) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer.status_code, await anext(answer.aiter_text())
        return answer.status_code, (await answer.aread()).decode(errors="replace")


async def test_no_operation_shows_or_changes_what_is_anothers(
    everything: Running, rows: Connection, things: dict[str, list[str]], request: pytest.FixtureRequest
) -> None:
    owner = await create_key(rows, tenant_id="acme", client_id="owner", scopes=sorted(SCOPES))
    stranger = await create_key(rows, tenant_id="rival", client_id="stranger", scopes=sorted(SCOPES))
    maker = await create_key(rows, tenant_id="acme", client_id="maker", scopes=sorted({*SCOPES, security.OPERATE}))
    acme = await asyncio.to_thread(Things, everything.url, maker.text, json.dumps(things))
    request.addfinalizer(acme.close)
    await asyncio.to_thread(acme.view)  # the owner lists it; the one to delete is deleted by then
    wrong: list[Any] = []
    listed: list[dict[str, Any]] = []
    tried = 0
    async with client_of(everything.url, stranger.text) as theirs, client_of(everything.url, owner.text) as mine:
        for name in OURS:
            about = await asyncio.to_thread(about_of, acme, name)
            sent = request_of(name, about)
            if about == Subject() or name in NAMELESS:
                if sent["method"] == "GET":
                    listed.append(sent)
                continue
            tried += 1
            before = await fingerprint(rows, "acme")
            status, text = await answer_of(theirs, sent)
            refused = (409, "lease_lost") if name in LOST else (404, "_not_found")
            refused = NOTHING.get(name, refused)
            if (status, refused[1] in text) != (refused[0], True):
                wrong.append((name, "stranger", status, text[:200]))
            if (after := await fingerprint(rows, "acme")) != before:
                wrong.append((name, "changed", {table for table in after if after[table] != before[table]}))
            status, text = await answer_of(mine, sent)
            if status >= 400:
                wrong.append((name, "owner", status, text[:300]))
        names = await names_of(rows, "acme")
        for sent in listed:
            _, text = await answer_of(theirs, sent)
            if shown := [name for name in names if name in text]:
                wrong.append((sent["url"], "shown", shown))
            _, text = await answer_of(mine, sent)
            if sent["url"] not in COUNTS and not any(name in text for name in names):
                wrong.append((sent["url"], "the owner sees nothing"))
    assert not wrong, "\n".join(map(str, wrong))
    assert (tried, len(listed)) > (40, 5)
