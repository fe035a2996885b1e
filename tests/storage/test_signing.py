"""A signed URL is, to the letter, the one that the S3 client would make."""

from __future__ import annotations

from typing import Any

import pytest
import time_machine
from pydantic import SecretStr

from leasehold.settings import Settings
from leasehold.storage.s3 import open_client
from leasehold.storage.signing import MAX_URL_SECONDS
from leasehold.storage.store import ObjectStore

AT = "2026-02-03T04:05:06Z"
KEYS = ("k", "media/01a2/original.jpg", "runs/ä ö/~a+b&c=d%20?#.bin", "a//b/./../c", "日本語")


def chosen(**changes: Any) -> Settings:
    keys = {"s3_access_key": SecretStr("access"), "s3_secret_key": SecretStr("s3cr3t")}
    return Settings(_env_file=None).model_copy(update=keys | changes)


STORES = {
    "by path": chosen(s3_endpoint="http://127.0.0.1:9000", s3_addressing="path"),
    "by host": chosen(s3_endpoint="https://s3.example.com:8443/", s3_addressing="virtual"),
    "below a path": chosen(s3_endpoint="https://example.com/store", s3_addressing="path"),
    "Amazon's": chosen(s3_endpoint=None, s3_addressing="auto", s3_region="eu-central-1"),
    "a bucket that is no host name": chosen(s3_endpoint=None, s3_addressing="auto", s3_bucket="My_Bucket.x"),
}


@pytest.mark.parametrize("settings", STORES.values(), ids=STORES)
async def test_a_signed_url_is_the_one_that_the_client_makes(settings: Settings) -> None:
    store = ObjectStore(settings.model_copy(update={"s3_conditional_puts": "yes"}))
    await store.open()
    try:
        async with open_client(settings, settings.s3_endpoint) as client:
            with time_machine.travel(AT, tick=False):
                for key in KEYS:
                    place = {"Bucket": settings.s3_bucket, "Key": key}
                    named = place | {"ResponseContentDisposition": "attachment; filename*=UTF-8''a%20b.txt"}
                    put = place | {"ContentType": "image/png", "ContentLength": 4, "IfNoneMatch": "*"}
                    free = place | {"ContentType": "image/png"}  # of any length, and over an object
                    expected = [
                        await client.generate_presigned_url("get_object", Params=place, ExpiresIn=60),
                        await client.generate_presigned_url("get_object", Params=named, ExpiresIn=60),
                        await client.generate_presigned_url("put_object", Params=put, ExpiresIn=61),
                        await client.generate_presigned_url("put_object", Params=free, ExpiresIn=62),
                    ]
                    signed = [
                        store.sign_get(key, seconds=60),
                        store.sign_get(key, seconds=60, download_name="a b.txt"),
                        store.sign_put(key, content_type="image/png", seconds=61, content_length=4, only_new=True),
                        store.sign_put(key, content_type="image/png", seconds=62),
                    ]
                    assert signed == expected
    finally:
        await store.close()


async def test_no_url_is_signed_for_longer_than_the_store_accepts() -> None:
    store = ObjectStore(STORES["by path"].model_copy(update={"s3_conditional_puts": "yes"}))
    await store.open()
    try:
        with time_machine.travel(AT, tick=False):
            week = store.sign_get("k", seconds=MAX_URL_SECONDS)
            assert "X-Amz-Expires=604800&" in week
            assert store.sign_get("k", seconds=MAX_URL_SECONDS + 1) == week
            put = store.sign_put("k", content_type="image/png", seconds=MAX_URL_SECONDS + 1)
            assert "X-Amz-Expires=604800&" in put
    finally:
        await store.close()
