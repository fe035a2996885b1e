"""The probes of a chaos run, against a real API: another tenant's key finds nothing of any kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from chaos import probes
from chaos.settings import SCOPES, TENANTS
from chaos.stack import Installation
from leasehold.db.database import connected
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import client_of, serving

#: What a tenant makes of each kind; a conversion is a form.
THINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "media": ("/upload-url", {"content_type": "image/jpeg", "file_name": "a.jpg"}),
    "run": ("/v1/runs", {"template": "short", "payload": {"text": "to"}}),
    "schedule": ("/v1/schedules", {"template": "short", "cron": "0 0 1 1 *", "payload_template": {"text": "to"}}),
    "webhook": ("/v1/webhooks", {"url": "http://127.0.0.1:9/"}),
    "generation": ("/v1/images/generations", {"prompt": "a cat"}),
    "template": ("/v1/templates", {"type": "mine", "steps": [{"id": "first", "queue": "chaos"}]}),
}


async def test_a_thing_of_each_kind_is_asked_for_and_not_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = settings.model_copy(
        update={
            "pipelines": "chaos.pipelines:declared",
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "egress_allow": "127.0.0.0/8",
            "generation_provider": "jimeng",
            "generation_credentials": {"jimeng": SecretStr("id:secret")},
        }
    )
    async with connected(known, "test") as connection:
        key = await create_key(connection, tenant_id=TENANTS[0], client_id="chaos", scopes=SCOPES)
    async with serving(known) as running, client_of(running.url, key.text) as client:
        for path, body in THINGS.values():
            answer = await client.post(path, json=body)
            assert answer.is_success, answer.text
        port = int(running.url.rpartition(":")[2])
        stub = SimpleNamespace(ports={"api-0": port}, connection=lambda: connected(known, "test"))
        installation = cast("Installation", stub)
        asked = await probes.probe_tenants(installation)
        assert {status for _, _, status in asked} == {404}, asked
        assert {kind for kind, _, _ in asked} == THINGS.keys() | {"job"} == probes.ENDPOINTS.keys() - {"conversion"}
        # Now the owner asks, by what neither ends a job nor follows it: each request finds its thing.
        others = ("{}/cancel", "{}/events")
        harmless = {
            kind: (query, tuple(one for one in endpoints if not one.startswith("DELETE") and not one.endswith(others)))
            for kind, (query, endpoints) in probes.ENDPOINTS.items()
        }
        monkeypatch.setattr(probes, "ENDPOINTS", harmless)
        monkeypatch.setattr(probes, "TENANTS", TENANTS[:1])
        found = await probes.probe_tenants(installation)
        assert [request for _, request, status in found if status == 404] == []
        assert {kind for kind, _, _ in found} == THINGS.keys() - {"webhook"} | {"job"}
