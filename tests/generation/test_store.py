"""What becomes of a provider's files: only real ones are stored, and what is missing is told."""

from __future__ import annotations

import httpx2
import pytest

from leasehold.pipelines.generation.files import UnusableFile, file_type_of
from leasehold.worker.worker import Worker
from tests.generation.conftest import SECONDS, Client
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
