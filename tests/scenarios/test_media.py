"""A picture goes in, and READY comes out, once: sections 12.2 and 12.3 of the testing plan for media."""

from __future__ import annotations

import asyncio
import io
from uuid import UUID

import httpx2
import pytest
from PIL import Image

from leasehold.broker import make_broker
from leasehold.broker.base import Hint
from leasehold.settings import Settings
from tests.pictures import encoded, noisy
from tests.scenarios.fleet import PATIENCE, Fleet
from tests.support.broker_room import BROKER_ROOM
from tests.support.bucket import Bucket


@pytest.fixture(scope="module")
def picture() -> bytes:
    return encoded(noisy(1600, 1200), "JPEG", quality=85)


async def objects(s3: Bucket, prefix: str) -> dict[str, bytes]:
    async with s3.client() as client:
        listed = await client.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)
        return {
            item["Key"].removeprefix(prefix): await (await client.get_object(Bucket=s3.bucket, Key=item["Key"]))[
                "Body"
            ].read()
            for item in listed.get("Contents", [])
        }


async def test_a_picture_goes_in_and_ready_comes_out(fleet: Fleet, s3: Bucket, picture: bytes) -> None:
    await fleet.api()
    await fleet.worker()
    accepted = await fleet.send(picture)
    view = await fleet.finished(accepted["media_id"])
    assert view["original"] == {**view["original"], "width": 1600, "height": 1200, "content_type": "image/jpeg"}
    assert [(step["name"], step["status"]) for step in view["steps"]] == [
        ("resize", "SUCCEEDED"), ("compress", "SUCCEEDED"), ("webp", "SUCCEEDED"),
    ]  # fmt: skip
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        final = await client.get(view["final_url"])
    with Image.open(io.BytesIO(final.content)) as image:
        assert (image.format, image.size) == ("WEBP", (1600, 1200))
    stored = await objects(s3, f"media/{accepted['media_id']}/")
    assert set(stored) == {"original.jpg", "resize.jpg", "compress.jpg", "final.webp"}
    await fleet.assert_done_once(UUID(accepted["job_id"]))
    await fleet.at_rest()


async def test_the_same_picture_twice_gives_the_same_bytes(fleet: Fleet, s3: Bucket, picture: bytes) -> None:
    await fleet.api_here()
    await fleet.worker()
    first, second = await fleet.send(picture), await fleet.send(picture)
    for accepted in (first, second):
        await fleet.finished(accepted["media_id"])
    assert await objects(s3, f"media/{first['media_id']}/") == await objects(s3, f"media/{second['media_id']}/")


async def test_completing_an_upload_ten_times_at_once_makes_one_of_everything(
    fleet: Fleet, s3: Bucket, picture: bytes
) -> None:
    await fleet.api_here()
    await fleet.worker()
    upload = await fleet.upload(picture)
    answers = await asyncio.gather(*(fleet.call("POST", "/complete-upload", json=upload) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {202}
    (job_id,) = {answer.json()["job_id"] for answer in answers}
    await fleet.finished(upload["media_id"])
    assert await fleet.rows.connection.fetchval("SELECT count(*) FROM job") == 1
    assert await fleet.rows.connection.fetchval("SELECT count(*) FROM task") == 3
    assert len(await objects(s3, f"media/{upload['media_id']}/")) == 4
    await fleet.assert_done_once(UUID(job_id))


async def test_a_message_delivered_five_times_and_out_of_order_does_its_work_once(
    fleet: Fleet, settings: Settings, picture: bytes
) -> None:
    await fleet.api_here()
    accepted = await fleet.send(picture)
    job_id = UUID(accepted["job_id"])
    tasks = await fleet.rows.connection.fetch(
        "SELECT id, queue FROM task WHERE job_id = $1 ORDER BY position DESC", job_id
    )
    broker = make_broker(settings.model_copy(update=BROKER_ROOM))
    await broker.open()
    await fleet.until(lambda: _true(broker.connected))
    hints = [Hint(row["id"], row["queue"]) for row in tasks] * 5  # the last step's first
    assert await broker.publish(hints) == [True] * 15
    await fleet.worker()
    await fleet.worker()
    await fleet.finished(accepted["media_id"])
    assert await broker.publish(hints) == [True] * 15  # and once more when all is done
    await broker.close()
    await fleet.at_rest()
    await fleet.assert_done_once(job_id)
    assert await fleet.rows.connection.fetchval("SELECT max(epoch) FROM task WHERE job_id = $1", job_id) == 1


async def _true(value: bool) -> bool:
    return value


BAD = {
    "zero bytes": (b"", "empty_file"),
    "not a picture": (b"%PDF-1.4 hello, this is no picture at all", "unsupported_format"),
    "cut in the middle": (encoded(noisy(800, 600), "JPEG")[:5000], "corrupt_image"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_picture_fails_with_its_code_and_delays_nobody(fleet: Fleet, kind: str, picture: bytes) -> None:
    data, code = BAD[kind]
    await fleet.api_here()
    await fleet.worker()
    upload = await fleet.upload(data)
    answer = await fleet.call("POST", "/complete-upload", json=upload)
    good = await fleet.send(picture)
    view = await fleet.finished(upload["media_id"], "FAILED")
    assert view["error"]["code"] == code
    if answer.status_code != 202:
        assert answer.json()["code"] == code
    await fleet.finished(good["media_id"])


async def test_an_original_that_was_swapped_for_a_huge_one_fails_and_fills_no_disk(
    fleet: Fleet, s3: Bucket, picture: bytes
) -> None:
    """The upload URL still works for a while after complete-upload has looked at what was there."""
    await fleet.api_here()
    upload = await fleet.upload(picture)
    accepted = await fleet.call("POST", "/complete-upload", json=upload)
    assert accepted.status_code == 202
    async with s3.client() as client:
        await client.put_object(Bucket=s3.bucket, Key=upload["original_key"], Body=bytes(257 * 1024 * 1024))
    await fleet.worker()
    view = await fleet.finished(upload["media_id"], "FAILED")
    assert view["error"]["code"] == "input_too_large"
