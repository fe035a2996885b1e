"""The Django example in a process of its own, for Django is configured once a process."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import orjson

from leasehold.db.database import connected
from leasehold.settings import Settings

ROOT = Path(__file__).parents[2]
SESSION = """
import json, sys
from examples import django_shop
from django.db import connection
from django.test import Client
with connection.schema_editor() as editor:
    editor.create_model(django_shop.Order)
client = Client(raise_request_exception=False)
placed = client.post("/orders", {"email": "me@home", "pieces": 1}, content_type="application/json")
refused = client.post("/orders", {"email": "me@home", "pieces": 0}, content_type="application/json")
print(json.dumps([placed.status_code, placed.json(), refused.status_code, django_shop.Order.objects.count()]))
"""


async def test_djangos_order_and_receipt_are_one_transaction(settings: Settings, database_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SESSION, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "SHOP_DATABASE_URL": database_url,
            "LEASEHOLD_DATABASE_URL": database_url,
            "LEASEHOLD_BROKER": "postgres",
            "LEASEHOLD_TENANT": "me",
        },
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    created, placed, refused, orders = orjson.loads(output.splitlines()[-1])
    assert (created, refused, orders) == (201, 500, 1)
    async with connected(settings, "test") as connection:
        rows = await connection.fetch("SELECT id, pipeline, params FROM job")
        assert await connection.fetchval("SELECT count(*) FROM outbox") == 0  # the program has announced its commit
    assert [(str(row["id"]), row["pipeline"], row["params"]) for row in rows] == [
        (placed["run"], "django_shop.send_receipt", {"order": placed["order"], "email": "me@home"})
    ]
