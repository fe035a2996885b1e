"""The attacks by name. `finding` is the number of the finding that first described an attack."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import httpx2

from bench.hostile.arena import Arena, silent_server

MIB = 1024 * 1024


def _bomb(depth: int) -> dict[str, object]:
    """A schema of `depth` definitions, each of which refers twice to the next: a check evaluates 2 ** depth of them."""
    defs: dict[str, object] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{depth}": {"type": "object"}}}


def _deep(levels: int) -> object:
    """Nested lists, with a number in the innermost list."""
    inner: object = 1
    for _ in range(levels):
        inner = [inner]
    return inner


_STEPS = [{"id": "only", "worker_type": "quiet.only"}]
_LISTS = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/lists"}}] * 3}
#: Name -> a schema, and a value that is checked against it.
_SCHEMAS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "doubled": (_bomb(20), {}),
    "unique": ({"properties": {"a": {"uniqueItems": True}}}, {"a": [{"n": n} for n in range(15_000)]}),
    "pattern": ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 50_000 + "b"}),
    "nested": ({"properties": {"a": {"$ref": "#/$defs/lists"}}, "$defs": {"lists": _LISTS}}, {"a": _deep(12)}),
}


async def nothing(arena: Arena) -> None:
    await arena.hold()


async def schemas(arena: Arena) -> None:
    """Schemas whose check never ends, used by runs of a template and by a schedule's run-now."""

    async def attack_once(number: int) -> None:
        name = list(_SCHEMAS)[number % len(_SCHEMAS)]
        schema, payload = _SCHEMAS[name]
        body = {"type": f"hostile_{name}_{number}", "version": 1, "payload_schema": schema, "steps": _STEPS}
        template_answer = await arena.ask("POST", "/v1/templates", body)
        if template_answer is None or template_answer.is_error:
            return
        template = body["type"]
        await arena.ask("POST", "/v1/runs", {"template": template, "payload": payload})
        schedule = {"template": template, "cron": "@yearly", "timezone": "UTC", "payload_template": payload}
        answer = await arena.ask("POST", "/v1/schedules", schedule)
        if answer is not None and answer.is_success:
            await arena.ask("POST", f"/v1/schedules/{answer.json()['id']}/run-now")

    await arena.repeat(attack_once, at_once=4, at_most=400)


async def receivers(arena: Arena) -> None:
    """Fifty webhooks at a server that never ends its answer, and runs with events for each of them."""
    async with silent_server(arena.settings.silent_port) as counts:
        for number in range(50):
            url = f"http://127.0.0.1:{arena.settings.silent_port}/{number}"
            await arena.ask("POST", "/v1/webhooks", {"url": url})
        await arena.repeat(lambda _: arena.ask("POST", "/v1/runs", {"template": "quiet"}), at_once=4, at_most=200)
        await arena.hold()
        arena.answers["deliveries open"] = counts["most open"]


async def promotions(arena: Arena) -> None:
    """Promote finished models, again and again, to a file service that never ends its answer."""
    async with silent_server(arena.settings.silent_port) as counts:
        listed = await arena.ask("GET", "/api/v1/jobs")
        jobs = [job["job_id"] for job in listed.json()["jobs"]] if listed is not None and listed.is_success else []
        body = {"targets": [{"artifact": name} for name in ("nef", "bie", "onnx")]}

        async def attack_once(number: int) -> None:
            await arena.ask("POST", f"/api/v1/jobs/{jobs[number % len(jobs)]}/promote", body)

        await arena.repeat(attack_once, at_once=30, at_most=600)
        await arena.hold()
        arena.answers["puts open"] = counts["most open"]


async def children(arena: Arena) -> None:
    """Isolated steps that use all the time and memory that a child may use."""
    await arena.repeat(lambda _: arena.ask("POST", "/v1/runs", {"template": "burning"}), at_once=4, at_most=200)
    await arena.hold()


_DUE = """
INSERT INTO schedule (id, tenant_id, cron, timezone, template, payload_template, scope, scope_id, priority, overlap,
                      catch_up, catch_up_seconds, next_run_at)
VALUES ($1, 'hostile', $2, $3, $4, '{}', 'tenant', '', 1, 'skip', 'all', 3600, clock_timestamp() - interval '1 hour')
"""


async def schedule_rows(arena: Arena) -> None:
    """Invalid rows, as an older release or a restored database may have left them."""
    connection = await asyncpg.connect(arena.settings.database_url)
    rows = [
        (uuid4(), cron, zone, template)
        for cron, zone, template in (
            ("* * * * *", "Mars/Olympus", "quiet"),
            ("* * * * *", "../../etc/passwd", "quiet"),
            ("61 * * * *", "UTC", "quiet"),
            ("nonsense", "UTC", "quiet"),
            ("* * * * *", "UTC", "no_such_template"),
        )
        for _ in range(20)
    ]
    try:
        await connection.executemany(_DUE, rows)
        arena.answers["rows"] = len(rows)
    finally:
        await connection.close()
    await arena.hold()


async def store(arena: Arena) -> None:
    """Complete uploads while the store accepts connections and answers nothing (the bench makes it hang)."""

    async def attack_once(_number: int) -> None:
        answer = await arena.ask("POST", "/upload-url", {"content_type": "image/jpeg", "file_name": "a.jpg"})
        if answer is None or answer.is_error:
            return
        ticket = answer.json()
        await arena.ask("POST", "/complete-upload", {name: ticket[name] for name in ("media_id", "original_key")})

    await arena.repeat(attack_once, at_once=30, at_most=600)


async def batches(arena: Arena) -> None:
    """Batches of a thousand runs."""
    body = {"template": "quiet", "runs": [{"payload": {}}] * 1000}
    await arena.repeat(lambda _: arena.ask("POST", "/v1/runs/batch", body), at_once=4, at_most=60)
    await arena.hold()


async def backfills(arena: Arena) -> None:
    """Schedules of every minute, each backfilled with a hundred ticks."""
    end = datetime.now(UTC) - timedelta(minutes=5)

    async def attack_once(_number: int) -> None:
        schedule = {"template": "quiet", "cron": "* * * * *", "timezone": "UTC", "payload_template": {}}
        answer = await arena.ask("POST", "/v1/schedules", schedule | {"overlap": "allow_all"})
        if answer is None or answer.is_error:
            return
        path = f"/v1/schedules/{answer.json()['id']}/backfill"
        for back in range(3):
            until = end - timedelta(minutes=99 * back)
            span = {"start": (until - timedelta(minutes=99)).isoformat(), "end": until.isoformat()}
            await arena.ask("POST", path, span)

    await arena.repeat(attack_once, at_once=4, at_most=60)
    await arena.hold()


async def uploads(arena: Arena) -> None:
    """Uploads of 40 MiB without a declared length, where 32 MiB are allowed."""
    data = bytes(40 * MIB)

    async def attack_once(_number: int) -> None:
        answer = await arena.ask("POST", "/upload-url", {"content_type": "image/jpeg", "file_name": "a.jpg"})
        if answer is None or answer.is_error:
            return
        ticket = answer.json()
        async with httpx2.AsyncClient(timeout=30) as client:
            put = await client.put(ticket["upload_url"], content=data, headers={"Content-Type": "image/jpeg"})
        arena.answers[f"put {put.status_code}"] += 1
        await arena.ask("POST", "/complete-upload", {name: ticket[name] for name in ("media_id", "original_key")})

    await arena.repeat(attack_once, at_once=2, at_most=8)
    await arena.hold()


async def bodies(arena: Arena) -> None:
    """Three hundred connections without a key. Each sends most of a body, and stops."""
    head = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: 1200000\r\n\r\n"
    paths = (b"/v1/runs", b"/v1/runs/batch", b"/api/v1/jobs", b"/v1/upload/images", b"/v1/templates")
    writers = []
    for number in range(300):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", arena.settings.port)
            writer.write(b"POST " + paths[number % len(paths)] + b" HTTP/1.1\r\n" + head)
            writer.write(b'{"template": "' + b"a" * 1_000_000)
            writers.append(writer)
        except ConnectionError as error:
            arena.answers[type(error).__name__] += 1
    await arena.hold()
    arena.answers["held"] = sum(not writer.is_closing() for writer in writers)
    for writer in writers:
        writer.transport.abort()


async def long_runs(arena: Arena) -> None:
    """Three hundred runs of forty seconds."""
    await arena.repeat(lambda _: arena.ask("POST", "/v1/runs", {"template": "sleeping"}), at_once=4, at_most=300)
    await arena.hold()


async def generations(arena: Arena) -> None:
    """Three hundred orders to a provider that never ends its answer."""
    async with silent_server(arena.settings.silent_port) as counts:
        order = {"prompt": "a cat", "model": "made-up"}
        await arena.repeat(lambda _: arena.ask("POST", "/v1/images/generations", order), at_once=4, at_most=300)
        await arena.hold()
        arena.answers["orders open"] = counts["most open"]


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `finding`: its number in the issue that lists the attacks. `hangs_store`: the store stops answering
    when the attack begins. `models`: how many finished conversions it needs. `settings`: the installation's settings,
    in which `{silent}` becomes the address of the silent server.
    """

    finding: int
    run: Callable[[Arena], Awaitable[None]]
    hangs_store: bool = False
    models: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)


ATTACKS: Mapping[str, Attack] = {
    "none": Attack(0, nothing),
    "schemas": Attack(1, schemas),
    "promotions": Attack(
        2, promotions, models=8, settings={"promote_url": "http://{silent}/models", "worker_queues": "default"}
    ),
    "receivers": Attack(3, receivers),
    "children": Attack(4, children),
    "schedule rows": Attack(6, schedule_rows),
    "store": Attack(6, store, hangs_store=True),
    "batches": Attack(8, batches),
    "backfills": Attack(8, backfills),
    "uploads": Attack(9, uploads),
    "bodies": Attack(10, bodies),
    "long runs": Attack(11, long_runs),
    "generations": Attack(11, generations),
}
