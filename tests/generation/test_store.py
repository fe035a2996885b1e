"""What becomes of a provider's files: only real ones are stored, and what is missing is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from leasehold.db.database import Connection
from leasehold.pipelines.generation.files import UnusableFile, download, file_type_of
from leasehold.pipelines.generation.provider import Kind
from leasehold.security.credentials import create_key
from leasehold.security.egress import Egress
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.generation.conftest import SCOPES, SECONDS, Client
from tests.generation.simulator.server import Simulator
from tests.generation.simulator.work import picture


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("html", "not_an_image"),
        ("huge", "file_too_large"),
        ("gone", "file_gone"),
        ("inside", "address_private"),
        ("empty", "file_empty"),
    ],
)
async def test_a_file_that_is_none_fails_the_generation_with_a_stable_code(
    client: Client, worker: Worker, word: str, code: str
) -> None:
    said = await client.ended(await client.ordered(f"a cat #file={word}"))
    assert (said["status"], said["error"]["code"], said["urls"]) == (-2, code, [])
    assert "s3cret" not in str(said)  # what signs the provider's links


async def test_a_file_that_has_moved_is_followed(client: Client, worker: Worker) -> None:
    done = await client.ended(await client.ordered("a cat #file=moved"))
    async with httpx2.AsyncClient(timeout=SECONDS) as anybody:
        assert (await anybody.get(done["url"])).content == picture(0)


async def test_what_could_be_had_of_several_files_is_kept_and_the_rest_is_told(client: Client, worker: Worker) -> None:
    done = await client.ended(await client.ordered("cats #files=3 #file=html #onlylast"))
    assert (done["status"], len(done["urls"])) == (-1, 2)
    metadata = done["metadata"]
    assert (metadata["total_files"], metadata["successful_uploads"]) == (3, 2)
    ((error),) = metadata["tos_upload_errors"]
    assert (error["file"], error["code"]) == (2, "not_an_image")


async def test_a_file_that_cannot_be_had_now_is_fetched_again_however_many_attempts_there_were_before_a_retry(
    client: Client, generation_settings: Settings, connection: Connection
) -> None:
    """A retry of the job, and each worker that is lost, leave the attempts of the ladder."""
    await client.ordered("a cat #file=away")
    await connection.execute("UPDATE task SET attempt = max_attempts WHERE step = 'store'")
    store = "SELECT status FROM task WHERE step = 'store'"
    async with Worker(generation_settings), asyncio.timeout(SECONDS):
        while (status := await connection.fetchval(store)) not in ("retry", "failed"):
            await asyncio.sleep(0.02)
    assert status == "retry"
    assert await connection.fetchval("SELECT code FROM failure") == "file_unavailable"


async def test_a_file_that_cannot_be_had_in_the_last_attempt_either_takes_the_others_along_no_more(
    client: Client, generation_settings: Settings, connection: Connection
) -> None:
    task = await client.ordered("cats #files=2 #file=away #onlylast")
    await connection.execute("UPDATE task SET errors = max_attempts - 1 WHERE step = 'store'")
    async with Worker(generation_settings):
        done = await client.ended(task)
    assert (done["status"], len(done["urls"])) == (-1, 1)
    assert [error["code"] for error in done["metadata"]["tos_upload_errors"]] == ["file_unavailable"]


@pytest.mark.parametrize(("kind", "is_too_large"), [("images", False), ("video", True)])
async def test_a_video_has_a_bound_of_its_own(
    generation_settings: Settings, connection: Connection, kind: str, *, is_too_large: bool
) -> None:
    mib = 1024 * 1024
    bounds = {"generation_image_max_bytes": 8 * mib, "generation_video_max_bytes": mib}
    narrow = generation_settings.model_copy(update=bounds)
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(narrow) as running, client_of(running.url, key.text) as http, Worker(narrow):
        task = await Client(http).ordered("a cat #file=huge", kind)  # of 4 MiB
        error = (await Client(http).ended(task, kind))["error"]
    assert ((error or {}).get("code") == "file_too_large") is is_too_large


@pytest.mark.parametrize("word", ["html", "huge"])
async def test_the_disk_holds_one_file_at_a_time_although_none_can_be_stored(
    client: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """A client's own model may return any number of links to files of gigabytes."""
    left_over: list[list[str]] = []

    async def spy(egress: Egress, settings: Settings, kind: Kind, url: str, path: Path) -> tuple[str, str]:
        left_over.append([file.name for file in path.parent.iterdir()])
        return await download(egress, settings, kind, url, path)

    monkeypatch.setattr("leasehold.pipelines.generation.steps.download", spy)
    await client.ended(await client.ordered(f"cats #files=3 #file={word}"))
    assert left_over == [[], [], []]


async def test_an_order_of_too_many_files_fails_before_any_is_fetched(
    client: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.pipelines.generation.steps._MAX_FILES", 2)
    assert len((await client.ended(await client.ordered("a pair #files=2")))["urls"]) == 2
    monkeypatch.setattr("leasehold.pipelines.generation.steps.download", None)
    said = await client.ended(await client.ordered("a crowd #files=3"))
    assert said["error"]["code"] == "too_many_files"


async def test_a_provider_that_is_done_without_files_has_failed(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    said = await client.ended(await client.ordered("a cat #nofiles"))
    assert said["error"]["code"] == "provider_no_files"


@pytest.mark.parametrize(
    ("kind", "head", "extension"),
    [
        ("image", b"\xff\xd8\xff\xe0", "jpg"),
        ("image", b"RIFF\x00\x00\x00\x00WEBPVP8 ", "webp"),
        ("image", b"\x00\x00\x00\x20ftypavif", "avif"),
        ("video", b"\x00\x00\x00\x18ftypisom", "mp4"),
        ("video", b"\x00\x00\x00\x14ftypqt  ", "mov"),
        ("video", b"\x1aE\xdf\xa3\x01", "webm"),
    ],
)
def test_a_file_is_known_by_its_first_bytes(kind: str, head: bytes, extension: str) -> None:
    assert file_type_of(kind, head)[0] == extension  # type: ignore[arg-type]  # of the table


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("image", b"xxxxxxxxWEBP"),
        ("image", b"<svg/>"),
        ("video", b"\xff\xd8\xff"),
        ("image", b"\x00\x00\x00\x18ftypisom"),
    ],
)
def test_what_a_file_claims_to_be_does_not_count(kind: str, head: bytes) -> None:
    with pytest.raises(UnusableFile):
        file_type_of(kind, head)  # type: ignore[arg-type]  # of the table
