"""An ONNX model goes in over HTTP, and a signed package comes out."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import httpx2

from leasehold.cli.signing_key import make_signing_key
from leasehold.pipelines.conversion import nef
from leasehold.security.credentials import create_key
from tests.conversion.models import network
from tests.scenarios.fleet import PATIENCE, Fleet

FORM = {"user_id": "u1", "model_id": "40000", "version": "0001", "platform": "720"}


async def test_a_model_goes_in_and_a_package_comes_out(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.api()
    pair = make_signing_key()
    await fleet.worker(worker_queues="conversion", conversion_signing_key=pair["private"])
    scopes = ("conversion:read", "conversion:write")
    key = await create_key(fleet.rows.connection, tenant_id="acme", client_id="test", scopes=scopes)
    async with httpx2.AsyncClient(
        base_url=fleet.api_url, headers={"Authorization": f"Bearer {key.text}"}, timeout=40
    ) as client:
        files = {"model": ("模型.onnx", network().SerializeToString())}
        created = await client.post("/api/v1/jobs", data=FORM, files=files)
        assert created.status_code == 201
        path = created.headers["Location"]
        async with asyncio.timeout(PATIENCE):
            while (job := (await client.get(path)).json())["status"] not in {"completed", "failed"}:
                await asyncio.sleep(0.1)
        assert (job["status"], job["error"], job["progress"]) == ("completed", None, 100)
        assert job["result_object_keys"]["nef"] == f"jobs/{job['job_id']}/output/out.nef"
        result = await client.get(f"{path}/result")
    (tmp_path / "out.nef").write_bytes(result.content)
    package = nef.read(tmp_path / "out.nef", trusted=[base64.b64decode(pair["public"])])
    assert package.manifest["model_id"] == 40000
    assert "filename*=UTF-8''%E6%A8%A1%E5%9E%8B.nef" in result.headers["Content-Disposition"]
    assert result.headers["Accept-Ranges"] == "none"
