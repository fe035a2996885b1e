"""Requests things of each tenant with another tenant's key, at every endpoint that names a thing (I21)."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import httpx2

from chaos.settings import TENANTS
from chaos.stack import Installation
from leasehold.security.credentials import create_key

#: How often a request is sent again while the API is away.
_TRIES = 10
#: How many things of each kind and tenant are requested.
_MOST_OF_A_KIND = 2
_SCOPES = (
    "media:read", "media:write", "runs:read", "runs:write", "jobs:read", "jobs:operate", "jobs:delete",
    "conversion:read", "conversion:write", "generation:read", "generation:write", "webhooks:write",
)  # fmt: skip
#: For each kind of thing, the query for all of them and the endpoints that name one: in the path, or as `task_id` of
#: the body.
ENDPOINTS = {
    "media": ("SELECT id, tenant_id FROM media", ("GET /media/{}", "GET /media/{}/events", "DELETE /media/{}")),
    "job": ("SELECT id, tenant_id FROM job", ("GET /v1/jobs/{}", "POST /v1/jobs/{}/cancel", "DELETE /v1/jobs/{}")),
    "run": (
        "SELECT job_id AS id, tenant_id FROM run",
        ("GET /v1/runs/{}", "GET /v1/runs/{}/events", "POST /v1/runs/{}/cancel"),
    ),
    "schedule": ("SELECT id, tenant_id FROM schedule", ("GET /v1/schedules/{}", "DELETE /v1/schedules/{}")),
    "webhook": ("SELECT id, tenant_id FROM webhook", ("DELETE /v1/webhooks/{}",)),
    "conversion": ("SELECT job_id AS id, tenant_id FROM conversion", ("GET /api/v1/jobs/{}",)),
    "generation": ("SELECT task_id AS id, tenant_id FROM generation", ("POST /v1/images/cancel",)),
    "template": ("SELECT type AS id, tenant_id FROM template", ("GET /v1/templates/{}", "GET /v1/templates/{}/1")),
}


async def probe_tenants(installation: Installation) -> list[tuple[str, str, int]]:
    """For each request: the kind of thing, the request in words, and the status of its answer."""
    keys, things = {}, {}
    async with installation.connection() as connection:
        for tenant in TENANTS:
            key = await create_key(connection, tenant_id=tenant, client_id="prober", scopes=list(_SCOPES))
            keys[tenant] = key.text
        for kind, (statement, _) in ENDPOINTS.items():
            things[kind] = await connection.fetch(
                f"SELECT id::text, tenant_id FROM (SELECT *, row_number() OVER (PARTITION BY tenant_id) AS nth"
                f" FROM ({statement}) AS thing) AS numbered WHERE nth <= $1",
                _MOST_OF_A_KIND,
            )
    url = f"http://127.0.0.1:{next(iter(installation.ports.values()))}"
    probes = []
    async with httpx2.AsyncClient(timeout=10) as http:
        for kind, (_, endpoints) in ENDPOINTS.items():
            for thing in things[kind]:
                other = TENANTS[(TENANTS.index(thing["tenant_id"]) + 1) % len(TENANTS)]
                for endpoint in endpoints:
                    method, _, path = endpoint.format(thing["id"]).partition(" ")
                    body = None if "{}" in endpoint else {"task_id": thing["id"]}
                    status = await _answer(http, method, f"{url}{path}", keys[other], body)
                    request = f"{method} {path} of {thing['tenant_id']}'s {thing['id']} by {other}"
                    probes.append((kind, request, status))
    return probes


async def _answer(http: httpx2.AsyncClient, method: str, url: str, key: str, body: dict[str, str] | None = None) -> int:
    """The status of the answer. A 503 is repeated: the API may not know yet that the faults are over."""
    for _ in range(_TRIES):
        answer = await http.request(method, url, headers={"Authorization": f"Bearer {key}"}, json=body)
        if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            break
        await asyncio.sleep(0.5)
    return answer.status_code
