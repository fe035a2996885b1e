"""A real nginx with the configuration that `leasehold cells nginx` prints, before two cells; and the commands."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import httpx2
import pytest
from typer.testing import CliRunner

from leasehold.cli import cells
from leasehold.cli.main import app
from leasehold.client import AsyncClient
from leasehold.embedded.debian import unpack_packages
from leasehold.embedded.directories import cache_directory
from leasehold.embedded.ports import free_port
from leasehold.embedded.process import EmbeddedError, Server, unprivileged
from leasehold.security.credentials import create_key
from tests.api.conftest import client_of
from tests.cells.conftest import Two, last_json
from tests.support.not_here import not_here

SECONDS = 60.0


@pytest.fixture(scope="module")
async def nginx() -> Path:
    target = cache_directory() / "nginx"
    path = target / "usr/sbin/nginx"
    if not path.exists():
        try:
            await unpack_packages(["nginx"], target, with_missing=True)
        except EmbeddedError as error:
            not_here(f"nginx: {error}")
    return path


def printed(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["cells", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
async def gateway(nginx: Path, two: Two, run_directory: Path) -> AsyncIterator[str]:
    """The URL of the nginx."""
    run_as, port = unprivileged(), free_port()
    directory = run_directory / f"nginx-{port}"
    run_as.make_directory(directory)
    block = printed("nginx", "--map", two.a.path, "--default", "a", "--port", port)
    temporary = "".join(
        f"{kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    run_as.write_file(
        directory / "nginx.conf",
        f"daemon off;\npid {directory}/pid;\nerror_log {directory}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{block}}}\n",
    )
    libraries = os.pathsep.join(map(str, nginx.parents[2].glob("usr/lib/*-gnu")))
    server = await Server.start(
        "nginx",
        [nginx, "-p", directory, "-e", directory / "error.log", "-c", directory / "nginx.conf"],
        log=directory / "log",
        env={"LD_LIBRARY_PATH": libraries},
        cwd=directory,
        run_as=run_as,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(SECONDS), httpx2.AsyncClient() as http:
            while True:
                try:
                    assert (await http.get(f"{url}/livez")).status_code == 200
                    break
                except httpx2.TransportError:
                    await asyncio.sleep(0.02)
        yield url
    finally:
        await server.kill()


async def test_a_gateway_sends_each_key_to_the_cell_that_it_names(two: Two, gateway: str) -> None:
    for cell, other in ((two.a, two.b), (two.b, two.a)):
        key = await cell.key(tenant=f"of-{cell.name}")
        async with client_of(gateway, key) as client:
            answer = await client.post("/v1/runs", json={"template": "noop", "payload": {}})
        assert answer.status_code == 202, answer.text
        run = answer.json()["id"]
        async with client_of(cell.running.url, key) as client:
            assert (await client.get(f"/v1/runs/{run}")).status_code == 200
        async with client_of(other.running.url, key) as client:
            assert (await client.get(f"/v1/runs/{run}")).status_code == 421
        async with client_of(gateway, key) as client:  # the scheme's name has no case (RFC 9110, 11.1)
            answer = await client.get(f"/v1/runs/{run}", headers={"Authorization": f"bearer {key}"})
            assert answer.status_code == 200, answer.text


def test_the_gateway_reaches_a_cell_at_an_ipv6_address(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    path.write_text('{"cells": {"a": "http://[::1]:8081/x/", "b": "https://b.example"}}')
    configuration = printed("nginx", "--map", path, "--default", "a")
    assert "    server [::1]:8081;\n" in configuration
    assert "    server b.example:443;\n" in configuration
    assert '    a "/x";\n' in configuration


def test_the_stage_of_a_move_is_asked_for_without_naming_the_other_cell() -> None:
    done = CliRunner().invoke(app, ["cells", "move", "acme"])
    assert (done.exit_code, "--to" in done.stderr) == (2, True)
    done = CliRunner().invoke(app, ["cells", "move", "acme", "--to", "b"])
    assert (done.exit_code, "--target-env" in done.stderr) == (2, True)


async def test_behind_a_gateway_a_moved_tenant_is_found_by_one_more_request(two: Two, gateway: str) -> None:
    key = await two.a.key()
    await two.b.take_over(key)
    two.place(acme="b")
    async with AsyncClient(gateway, key) as client:
        run = await client.submit("noop", {})
    async with client_of(two.b.running.url, key) as direct:
        assert (await direct.get(f"/v1/runs/{run.id}")).status_code == 200


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that serves may stand still for seconds on a busy machine."""
    monkeypatch.setattr(cells, "_ANSWER_SECONDS", 60.0)


async def test_status_asks_each_cell_and_fails_if_one_does_not_serve(two: Two, patient: None) -> None:
    two.place(acme="b", other="b")
    rows = last_json(await asyncio.to_thread(printed, "status", "--map", two.a.path, "--json"))
    placed = [(row["cell"], row["tenants_placed"], row["state"], row["because"]) for row in rows]
    assert placed == [("a", 0, "ready", "no_key"), ("b", 2, "ready", "no_key")]
    document = json.loads(two.a.path.read_text())
    document["cells"]["b"] = "http://127.0.0.1:9"
    two.a.path.write_text(json.dumps(document))
    done = await asyncio.to_thread(CliRunner().invoke, app, ["cells", "status", "--map", str(two.a.path), "--json"])
    assert done.exit_code == 1
    assert [row["state"] for row in last_json(done.stdout)] == ["ready", "silent"]


async def test_status_says_what_the_cells_have_to_do_and_what_is_unknown(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    async with client_of(two.a.running.url, await two.a.key()) as client:
        assert (await client.post("/v1/runs", json={"template": "noop", "payload": {}})).status_code == 202
    connection = await asyncpg.connect(two.a.database_url)
    made = await create_key(connection, tenant_id="op", client_id="op", scopes=("fleet:operate",), cell="a")
    await connection.close()
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"a": made.text, "b": await two.b.key()}))  # the second key is no operator's
    text = await asyncio.to_thread(printed, "status", "--map", two.a.path, "--keys", path, "--json")
    rows = last_json(text)
    said = [(row["cell"], row["because"], row["versions"], row["due"], row["running"], row["failed"]) for row in rows]
    assert said == [("a", None, [], 1, 0, 0), ("b", "key_refused", None, None, None, None)]
    assert rows[0]["oldest"] >= 0
    assert made.text not in text
    path.write_text(f'{{"a": "{made.text}"')
    done = CliRunner().invoke(app, ["cells", "status", "--map", str(two.a.path), "--keys", str(path)])
    assert done.exit_code == 1
    assert "not JSON" in done.stderr
    assert made.text not in done.stderr
    monkeypatch.setenv("LEASEHOLD_CELLS_KEYS", f'{{"a": "{made.text}"}}')
    text = await asyncio.to_thread(printed, "status", "--map", two.a.path, "--json")
    assert [row["due"] for row in last_json(text)] == [1, None]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "No such file"), ("{", "not JSON"), ('{"cells": {"A": "x"}}', "not a name for a cell")],
)
def test_a_map_that_cannot_be_used_ends_the_command_with_a_sentence(
    tmp_path: Path, content: str | None, sentence: str
) -> None:
    path = tmp_path / "cells.json"
    if content is not None:
        path.write_text(content)
    done = CliRunner().invoke(app, ["cells", "status", "--map", str(path)])
    assert done.exit_code == 1
    assert sentence in done.stderr


def test_a_gateway_needs_a_default_cell_of_the_map(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    path.write_text('{"cells": {"a": "https://a.example"}}')
    done = CliRunner().invoke(app, ["cells", "nginx", "--map", str(path), "--default", "b"])
    assert done.exit_code == 2
    assert "names no cell 'b'" in done.stderr
