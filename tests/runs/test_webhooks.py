"""Who asked for it is told how runs end, at least once, with a signature, and nobody inside is reached that way."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from leasehold.api.auth.audit import record
from leasehold.api.process import deadline
from leasehold.api.process.metrics import IN_FLIGHT
from leasehold.api.process.tenant_pool import TenantPool
from leasehold.api.runs import webhooks as endpoints
from leasehold.db.clock import database_time
from leasehold.db.database import Connection, connect
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Snooze
from leasehold.limits.bounds import check_room
from leasehold.pipelines.webhooks.context import DeliveryContext
from leasehold.pipelines.webhooks.limits import DeliveryLimits
from leasehold.pipelines.webhooks.pipeline import Delivery, webhooks
from leasehold.pipelines.webhooks.steps import deliver
from leasehold.security.credentials import create_key
from leasehold.security.egress import Answer, Egress, EgressRefused
from leasehold.security.sealing import Sealing, Unsealable
from leasehold.settings import Settings
from leasehold.transitions.callbacks import find as find_callback_secret
from leasehold.transitions.webhooks import disable, dispatch, watch
from leasehold.transitions.webhooks import find as find_webhook
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of, serving, value_of
from tests.api.media_api import problem
from tests.runs.conftest import SCOPES, Client


@dataclass
class Receiver:
    """A real HTTP server; answers with `statuses` in turn, the last one for ever."""

    url: str = ""
    statuses: list[int] = field(default_factory=lambda: [200])
    heard: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    retry_after: str = "0"
    body: bytes = b""
    before_answer: Callable[[], Awaitable[object]] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a worker that stops goes away
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head) if name}
        body = await reader.readexactly(int(headers["content-length"]))
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        self.heard.append((headers, body))
        if self.before_answer is not None:
            await self.before_answer()
        size = f"content-length: {len(self.body)}"
        writer.write(f"HTTP/1.1 {status} X\r\nretry-after: {self.retry_after}\r\n{size}\r\n\r\n".encode() + self.body)
        await writer.drain()

    async def hears(self, messages: int) -> None:
        async with asyncio.timeout(60):
            while len(self.heard) < messages:
                await asyncio.sleep(0.02)

    async def hears_retries(self, messages: int, rows: Connection) -> None:
        """As `hears`, and nobody waits for the delay of a retry."""
        async with asyncio.timeout(60):
            while len(self.heard) < messages:
                await rows.execute("UPDATE task SET available_at = clock_timestamp() WHERE status = 'retry'")
                await asyncio.sleep(0.05)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield receiver
    server.close()


@pytest.fixture
def runs_settings(runs_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The deliverer reads the environment, as a worker's does."""
    changes = {
        "egress_allow": "127.0.0.0/8",
        "sealing_keys": SecretStr(Fernet.generate_key().decode()),
        "pipelines": "tests.runs.work:pipelines_and_webhooks",
        "webhook_seconds": 50.0,
    }
    changed = runs_settings.model_copy(update=changes)
    for name in ("egress_allow", "sealing_keys", "database_url", "webhook_seconds"):
        value = getattr(changed, name)
        said = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        monkeypatch.setenv(f"LEASEHOLD_{name.upper()}", said)
    monkeypatch.setattr("leasehold.security.egress._CONNECT_SECONDS", 60.0)  # a delivery that failed would be one more
    return changed


async def subscribe(client: Client, url: str, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/webhooks", url=url, **body)
    assert answer.status_code == 201, answer.text
    said: dict[str, Any] = answer.json()
    return said


def signed(secret: str, headers: dict[str, str], body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()


async def test_a_run_that_ends_is_told_of_with_a_signature(client: Client, worker: Worker, receiver: Receiver) -> None:
    hook = await subscribe(client, receiver.url, events=["run.failed"])
    await client.until(await client.start(), "succeeded")  # nobody asked to hear of it
    run = await client.start(payload={"do": "fail"})
    await receiver.hears(1)
    ((headers, body),) = receiver.heard
    said = json.loads(body)
    assert (said["type"], said["data"]["id"], said["data"]["error"]["code"]) == ("run.failed", run, "broken")
    assert headers["webhook-signature"] == signed(hook["secret"], headers, body)
    assert abs(int(headers["webhook-timestamp"]) - time()) < 300  # a receiver refuses what is older
    assert "secret" not in (await client.http.get("/v1/webhooks")).json()["webhooks"][0]


async def test_a_delivery_that_is_refused_is_tried_again_under_the_same_id(
    client: Client, worker: Worker, receiver: Receiver, rows: Connection
) -> None:
    receiver.statuses = [500, 302, 200]
    hook = await subscribe(client, receiver.url)
    await client.start()
    await receiver.hears_retries(3, rows)
    assert len({headers["webhook-id"] for headers, _ in receiver.heard}) == 1
    async with asyncio.timeout(60):
        while True:
            said = (await client.http.get(f"/v1/webhooks/{hook['id']}/deliveries")).json()["deliveries"]
            if said[0]["status"] == "succeeded":
                break
            await asyncio.sleep(0.05)
    assert said[0]["attempt"] == 3
    assert (await client.http.get("/v1/webhooks")).json()["webhooks"][0]["enabled"]  # only 410 ends a webhook


async def test_a_webhook_that_is_made_again_by_its_key_after_its_deletion_is_not_there(
    client: Client, receiver: Receiver
) -> None:
    """Its secret has gone with it: the first answer cannot be repeated."""
    headers = {"Idempotency-Key": "k"}
    made = await client.http.post("/v1/webhooks", json={"url": receiver.url}, headers=headers)
    again = await client.http.post("/v1/webhooks", json={"url": receiver.url}, headers=headers)
    assert (again.status_code, again.json()) == (201, made.json())
    assert (await client.http.delete(f"/v1/webhooks/{made.json()['id']}")).status_code == 204
    again = await client.http.post("/v1/webhooks", json={"url": receiver.url}, headers=headers)
    problem(again, 404, "webhook_not_found")


def test_a_delivery_is_tried_at_the_times_of_the_guide() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/webhooks.md").read_text()
    (times,) = re.findall(r"tried immediately, then after (.*?) or when `Retry-After` says", page, re.DOTALL)
    units = {"s": 1, "m": 60, "h": 3600}
    delays = [timedelta(seconds=int(n) * units[unit]) for n, unit in re.findall(r"(\d+) ([smh])\b", times)]
    step = webhooks.by_name["deliver"]
    assert (list(step.retry_ladder), step.max_attempts) == (delays, len(delays) + 1)
    assert len(delays) == 9


async def test_secrets_rotate_without_a_gap(client: Client, worker: Worker, receiver: Receiver) -> None:
    hook = await subscribe(client, receiver.url)
    newer, newest = [(await client.post(f"/v1/webhooks/{hook['id']}/rotate")).json()["secret"] for _ in range(2)]
    await client.start()
    await receiver.hears(1)
    headers, body = receiver.heard[0]  # the first secret is two rotations old: it signs nothing any more
    assert headers["webhook-signature"].split() == [signed(newest, headers, body), signed(newer, headers, body)]


async def test_a_message_that_is_accepted_is_delivered_however_large_the_answer_is(
    client: Client, worker: Worker, receiver: Receiver, rows: Connection
) -> None:
    """Many frameworks answer with a page. It was read, and refused as too large, and the message was sent again."""
    receiver.body = b"<p>Thanks!" * 10_000
    await subscribe(client, receiver.url)
    await client.start()
    ended = "SELECT status, errors FROM task WHERE step = 'deliver' AND finished_at IS NOT NULL"
    async with asyncio.timeout(60):
        while not (found := await rows.fetch(ended)):
            await rows.execute("UPDATE task SET available_at = clock_timestamp() WHERE status = 'retry'")
            await asyncio.sleep(0.05)
    assert ([tuple(row) for row in found], len(receiver.heard)) == ([("succeeded", 0)], 1)


@pytest.mark.parametrize("body", [b"", b"Gone. " * 20_000], ids=["no body", "a large body"])
async def test_an_address_that_is_gone_disables_its_webhook(
    client: Client, worker: Worker, receiver: Receiver, body: bytes
) -> None:
    receiver.statuses, receiver.body = [410], body
    hook = await subscribe(client, receiver.url)
    await client.start()
    async with asyncio.timeout(60):
        while (await client.http.get("/v1/webhooks")).json()["webhooks"][0]["enabled"]:
            await asyncio.sleep(0.05)
    assert "410" in (await client.http.get("/v1/webhooks")).json()["webhooks"][0]["disabled_because"]
    assert (await client.http.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": True})).json()["enabled"]


@pytest.mark.parametrize(
    ("retry_after", "shortest", "longest"),
    [
        ("0", 2.5, 60.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 2.5, 60.0),
        ("600", 600.0, 660.0),
    ],
)
async def test_a_receiver_may_lengthen_the_delay_of_a_retry_and_not_shorten_it(
    client: Client,
    worker: Worker,
    receiver: Receiver,
    rows: Connection,
    settings: Settings,
    retry_after: str,
    shortest: float,
    longest: float,
) -> None:
    """A receiver that always answers 0 would otherwise use up all attempts in seconds."""
    receiver.statuses, receiver.retry_after = [503], retry_after

    async def pause() -> None:
        """Else a second attempt might begin before anybody has looked. The test looks by `rows` at the same time."""
        another = await connect(settings, "test")
        try:
            await another.execute("INSERT INTO paused_queue (queue, reason) SELECT DISTINCT queue, 'a test' FROM task"
                                  " WHERE status = 'running'")  # fmt: skip
        finally:
            await another.close()

    receiver.before_answer = pause
    await subscribe(client, receiver.url)
    await client.start()
    query = (
        "SELECT extract(epoch FROM available_at - started_at)::float8 FROM task WHERE status = 'retry' AND attempt = 1"
    )
    async with asyncio.timeout(60):
        while (delay := await rows.fetchval(query)) is None:
            await asyncio.sleep(0.01)
    assert shortest <= delay < longest


async def test_a_url_that_is_changed_during_a_request_is_not_disabled_for_the_old_ones_410(
    client: Client, worker: Worker, receiver: Receiver, rows: Connection
) -> None:
    receiver.statuses = [410, 200]
    hook = await subscribe(client, receiver.url)

    async def change() -> None:
        receiver.before_answer = None
        answer = await client.http.patch(f"/v1/webhooks/{hook['id']}", json={"url": f"{receiver.url}/new"})
        assert answer.status_code == 200, answer.text

    receiver.before_answer = change
    await client.start()
    await receiver.hears_retries(2, rows)
    (shown,) = (await client.http.get("/v1/webhooks")).json()["webhooks"]
    assert (shown["enabled"], shown["url"]) == (True, f"{receiver.url}/new")


@pytest.mark.parametrize("by", ["the owner", "another 410"])
async def test_a_webhook_that_was_enabled_again_is_not_disabled_for_a_410_to_an_earlier_request(
    client: Client, worker: Worker, receiver: Receiver, rows: Connection, settings: Settings, by: str
) -> None:
    receiver.statuses = [410, 200]
    hook = await subscribe(client, receiver.url)
    url = f"/v1/webhooks/{hook['id']}"

    async def disable_and_enable() -> None:
        receiver.before_answer = None
        if by == "the owner":
            assert (await client.http.patch(url, json={"enabled": False})).is_success
        else:
            another = await connect(settings, "test")
            try:
                assert await disable(another, UUID(hook["id"]), "acme", receiver.url, None, "a test")
            finally:
                await another.close()
        assert (await client.http.patch(url, json={"enabled": True})).is_success

    receiver.before_answer = disable_and_enable
    await client.start()
    await receiver.hears_retries(2, rows)
    (shown,) = (await client.http.get("/v1/webhooks")).json()["webhooks"]
    assert (shown["enabled"], shown["disabled_because"]) == (True, None)


async def ended_run(client: Client) -> str:
    run = await client.start()
    assert (await client.post(f"/v1/runs/{run}/cancel")).is_success
    return run


async def deliveries(rows: Connection) -> list[tuple[str, str]]:
    """(run, webhook) of each delivery that was written, the oldest first."""
    await dispatch(rows, webhooks, 86_400)
    found = await rows.fetch("SELECT params FROM job WHERE pipeline = 'webhook' ORDER BY id")
    return [(row["params"]["event"]["data"]["id"], row["params"]["webhook_id"]) for row in found]


async def test_a_disabled_webhook_is_told_of_nothing_until_it_is_enabled_again(
    client: Client, receiver: Receiver, rows: Connection
) -> None:
    hook, other = await subscribe(client, receiver.url), await subscribe(client, receiver.url)
    await disable(rows, UUID(hook["id"]), "rival", receiver.url, None, "it is not theirs")
    first = await ended_run(client)
    assert sorted(await deliveries(rows)) == sorted([(first, hook["id"]), (first, other["id"])])
    await disable(rows, UUID(hook["id"]), "acme", receiver.url, None, "a test")
    found = {one["id"]: one for one in (await client.http.get("/v1/webhooks")).json()["webhooks"]}
    assert (found[hook["id"]]["enabled"], found[hook["id"]]["disabled_because"]) == (False, "a test")
    assert found[other["id"]]["enabled"]
    second = await ended_run(client)
    assert (await deliveries(rows))[2:] == [(second, other["id"])]
    again = (await client.http.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": True})).json()
    assert (again["enabled"], again["disabled_because"]) == (True, None)
    third = await ended_run(client)
    assert sorted((await deliveries(rows))[3:]) == sorted([(third, hook["id"]), (third, other["id"])])


async def test_who_settles_a_disabled_webhook_learns_since_when_it_is_disabled(
    client: Client, receiver: Receiver, rows: Connection
) -> None:
    hook = await subscribe(client, receiver.url)
    await rows.execute("UPDATE webhook SET created_at = created_at - interval '1 year'")
    before = await database_time(rows)
    await disable(rows, UUID(hook["id"]), "acme", receiver.url, None, "a test")

    key = await create_key(rows, tenant_id="acme", client_id="settler", scopes=("jobs:read", *SCOPES))
    async with client_of(str(client.http.base_url), key.text) as settler:

        async def since() -> datetime:
            (item,) = (await settler.get("/v1/unsettled", params={"what": "webhooks"})).json()["items"]
            return datetime.fromisoformat(item["since"])

        assert before <= await since() <= await database_time(rows)
        await rows.execute("UPDATE webhook SET disabled_at = NULL")  # as an earlier release left it
        assert await since() == await rows.fetchval("SELECT created_at FROM webhook")


async def test_a_delivery_that_was_written_before_its_webhook_was_deleted_is_not_sent(
    client: Client, receiver: Receiver, rows: Connection, runs_settings: Settings
) -> None:
    hook = await subscribe(client, receiver.url)
    await ended_run(client)
    assert len(await deliveries(rows)) == 1
    await client.http.delete(f"/v1/webhooks/{hook['id']}")
    async with Worker(runs_settings), asyncio.timeout(60):
        while (await rows.fetchval("SELECT status FROM job WHERE pipeline = 'webhook'")) != "succeeded":
            await asyncio.sleep(0.02)
    assert receiver.heard == []


async def disabled_with_a_delivery(client: Client, receiver: Receiver, rows: Connection) -> str:
    """A webhook that was disabled before its one delivery was tried. Returns its path."""
    hook = await subscribe(client, receiver.url)
    await ended_run(client)
    assert len(await deliveries(rows)) == 1
    url = f"/v1/webhooks/{hook['id']}"
    await client.http.patch(url, json={"enabled": False})
    return url


async def test_a_delivery_waits_while_its_webhook_is_disabled_and_comes_once_it_is_enabled(
    client: Client, receiver: Receiver, rows: Connection, runs_settings: Settings
) -> None:
    """It was dropped, and told as `succeeded`: the owner could not know which messages to send again."""
    url = await disabled_with_a_delivery(client, receiver, rows)
    async with Worker(runs_settings), asyncio.timeout(60):
        while (await rows.fetchval("SELECT code FROM failure")) is None:
            await asyncio.sleep(0.02)
        (waiting,) = (await client.http.get(f"{url}/deliveries")).json()["deliveries"]
        assert (waiting["finished_at"], waiting["attempt"]) == (None, 1)
        assert await rows.fetchval("SELECT code FROM failure") == "webhook_disabled"
        assert receiver.heard == []
        await client.http.patch(url, json={"enabled": True})
        await receiver.hears_retries(1, rows)
        while (await rows.fetchval("SELECT status FROM job WHERE pipeline = 'webhook'")) != "succeeded":
            await asyncio.sleep(0.02)
    assert len(receiver.heard) == 1


async def test_a_delivery_whose_webhook_stays_disabled_fails_in_the_end_and_is_a_dead_letter(
    client: Client, receiver: Receiver, rows: Connection, runs_settings: Settings
) -> None:
    """After all of its tries, so after days."""
    url = await disabled_with_a_delivery(client, receiver, rows)
    await rows.execute("UPDATE task SET errors = max_attempts - 1 WHERE step = 'deliver'")
    async with Worker(runs_settings), asyncio.timeout(60):
        while (await rows.fetchval("SELECT status FROM job WHERE pipeline = 'webhook'")) != "failed":
            await asyncio.sleep(0.02)
        (failed,) = (await client.http.get(f"{url}/deliveries")).json()["deliveries"]
        assert failed["error"]["code"] == "webhook_disabled"
        await client.http.patch(url, json={"enabled": True})
        assert (await client.http.post(f"{url}/deliveries/{failed['id']}/redeliver")).status_code == 202
        await receiver.hears(1)


@dataclass
class Attempt:
    """The fourth attempt at a delivery, whose receiver answers as `says`."""

    rows: Connection
    sealing: Sealing
    says: Answer | EgressRefused | None
    params: Delivery
    errors: int = 3
    tenant_id: str = "acme"
    job_id: UUID = field(default_factory=uuid4)
    limits: DeliveryLimits = field(default_factory=lambda: DeliveryLimits(per_tenant=2, per_host=1))
    reads_body: bool = True
    egress: Any = None
    seconds: float = 0.5

    @property
    def opened(self) -> DeliveryContext:
        egress: Any = self.egress or SimpleNamespace(request=self._request)
        return DeliveryContext(egress, self.sealing, self.limits, self.seconds)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        yield self.rows

    async def note(self) -> dict[str, Any]:
        return {}

    async def _request(self, *_: Any, reads_body: bool, **__: Any) -> Answer:
        self.reads_body = reads_body
        assert self.says is not None
        if isinstance(self.says, EgressRefused):
            raise self.says
        return self.says

    async def deliver(self) -> Any:
        attempt: Any = self
        return await deliver(attempt)


async def test_a_delivery_says_what_became_of_it(rows: Connection, runs_settings: Settings) -> None:
    """Delivered after 2xx; tried again after any other answer, and while DNS does not know the host."""
    to = Delivery(url="http://hook.example/", event={"type": "run.failed"})
    said: Answer | EgressRefused = Answer(299, {}, b"")
    attempt = Attempt(rows, Sealing(runs_settings), Answer(200, {}, b""), to)
    assert await attempt.deliver() == {"delivered": True, "status": 200}
    attempt.says = said
    assert await attempt.deliver() == {"delivered": True, "status": 299}
    assert not attempt.reads_body, "a receiver's answer cannot fill the worker's memory"
    with attempt.limits.try_acquire(tenant="rival", host="hook.example"):
        assert isinstance(await attempt.deliver(), Snooze), "another delivery to this host is on its way"
        attempt.params = Delivery(url="http://HOOK.example.:80/", event={"type": "run.failed"})
        assert isinstance(await attempt.deliver(), Snooze), "it is the same host, written in another way"
    attempt.params = to
    with attempt.limits.try_acquire(tenant="rival", host="other.example"):
        assert await attempt.deliver() == {"delivered": True, "status": 299}

    attempt.says = Answer(300, {}, b"")
    with pytest.raises(Retryable, match="answered 300") as refused:
        await attempt.deliver()
    assert refused.value.after is not None
    assert 3600 <= refused.value.after.total_seconds() <= 7200, "the fourth delay of the ladder"

    attempt.says = EgressRefused("host_unknown", "no such host")
    with pytest.raises(Retryable, match="no such host"):
        await attempt.deliver()
    attempt.says = EgressRefused("address_private", "a private address")
    with pytest.raises(Permanent, match="a private address"):
        await attempt.deliver()
    attempt.params = Delivery(url="http://a[b/", event={})  # an earlier release took it
    attempt.says = EgressRefused("url_malformed", "a malformed URL")
    with pytest.raises(Permanent, match="a malformed URL"):
        await attempt.deliver()

    attempt.params = Delivery(webhook_id=uuid4(), event={})
    assert await attempt.deliver() == {"delivered": False, "because": "the webhook is deleted"}


async def test_an_address_that_answers_410_gets_no_further_message_until_its_webhook_is_enabled_again(
    rows: Connection, runs_settings: Settings
) -> None:
    """If the webhook was changed during the request, the answer is about an address that it no longer has."""
    hook = uuid4()
    await rows.execute("INSERT INTO webhook (id, tenant_id, url, secrets, events)"
                       " VALUES ($1, 'acme', 'http://hook.example/', '{}', '{run.failed}')", hook)  # fmt: skip
    to_url, to_hook = Delivery(url="http://hook.example/", event={}), Delivery(webhook_id=hook, event={})
    attempt = Attempt(rows, Sealing(runs_settings), Answer(410, {}, b""), to_url)

    async def refused(kind: type[Permanent | Retryable]) -> str:
        with pytest.raises(kind) as error:
            await attempt.deliver()
        return error.value.code

    async def change_meanwhile(*_: Any, **__: Any) -> Answer:
        await rows.execute("UPDATE webhook SET url = 'http://new.example/'")
        return Answer(410, {}, b"")

    assert await refused(Permanent) == "callback_gone"
    attempt.params, attempt.egress = to_hook, SimpleNamespace(request=change_meanwhile)
    assert await refused(Retryable) == "webhook_url_changed"
    assert await rows.fetchval("SELECT enabled FROM webhook")
    attempt.egress = None
    assert await refused(Permanent) == "webhook_gone"
    assert await rows.fetchval("SELECT disabled_because FROM webhook WHERE NOT enabled") == (
        "its address answered 410 Gone"
    )
    attempt.says = Answer(200, {}, b"")
    assert await refused(Retryable) == "webhook_disabled"
    await rows.execute("UPDATE webhook SET enabled = true, disabled_because = NULL")
    assert await attempt.deliver() == {"delivered": True, "status": 200}


async def test_the_deliveries_of_a_worker_have_the_bounds_of_its_settings(runs_settings: Settings) -> None:
    bounds = {"webhook_per_tenant": 2, "webhook_per_host": 1, "webhook_seconds": 3.0}
    opened = webhooks.opened(runs_settings.model_copy(update=bounds), None)
    assert opened is not None
    async with opened as delivery_context:
        acquire = delivery_context.limits.try_acquire
        assert delivery_context.seconds == 3.0
        with acquire(tenant="acme", host="a.example"), acquire(tenant="acme", host="b.example") as second:
            assert second
            with acquire(tenant="acme", host="c.example") as third, acquire(tenant="rival", host="a.example") as again:
                assert (third, again) == (False, False)


async def test_a_tenant_with_silent_name_servers_takes_no_more_threads_than_deliveries(
    rows: Connection, runs_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery ends in time, and its thread does not. All tenants share the threads that resolve names."""
    asked, answer = list[str](), threading.Event()

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        answer.wait(120)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    hosts = [f"{number}.silent.example" for number in range(3)]
    to = [Delivery(url=f"https://{host}/", event={"type": "run.failed"}) for host in hosts]
    async with Egress() as egress:
        attempt = Attempt(rows, Sealing(runs_settings), None, to[0], egress=egress)
        try:
            for attempt.params, host in zip(to[:2], hosts[:2], strict=True):
                while host not in asked:  # a machine may be too busy to begin the thread in time
                    with pytest.raises(Retryable) as late:
                        await attempt.deliver()
                    assert late.value.code == "webhook_unreachable"
            attempt.params = to[2]
            assert isinstance(await attempt.deliver(), Snooze), "both threads of the tenant are still waiting"
            attempt.params, attempt.tenant_id = to[0], "rival"
            assert isinstance(await attempt.deliver(), Snooze), "and the one of the host"
            assert asked == hosts[:2]
        finally:
            answer.set()
        attempt.params, attempt.tenant_id, attempt.seconds = to[2], "acme", 50.0

        async def deliver_when_the_threads_have_ended() -> None:
            while isinstance(await attempt.deliver(), Snooze):
                await asyncio.sleep(0.01)

        with pytest.raises(Permanent, match="not public"):
            await asyncio.wait_for(deliver_when_the_threads_have_ended(), 60)
    assert asked == hosts


async def test_a_tenants_webhook_hears_of_its_own_runs_and_of_the_ends_that_it_asked_for(
    client: Client, stranger: Client, receiver: Receiver, rows: Connection
) -> None:
    mine, theirs = await subscribe(client, receiver.url), await subscribe(stranger, receiver.url)
    await subscribe(client, receiver.url, events=["run.succeeded", "run.failed"])
    runs = [(await ended_run(client), mine["id"]), (await ended_run(stranger), theirs["id"])]
    assert sorted(await deliveries(rows)) == sorted(runs)
    assert sorted(await deliveries(rows)) == sorted(runs)  # another look makes no second one


async def test_a_list_of_deliveries_searches_a_bounded_number_of_the_tenants(
    client: Client, stranger: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One webhook may have none among the million of another, and no index knows which delivery is whose."""
    quiet, loud = [await subscribe(client, receiver.url) for _ in range(2)]
    foreign = await subscribe(stranger, receiver.url)

    async def send(by: Client, hook: dict[str, Any]) -> str:
        return str((await by.post(f"/v1/webhooks/{hook['id']}/test")).json()["id"])

    async def listed(hook: dict[str, Any], **params: int) -> list[str]:
        answer = await client.http.get(f"/v1/webhooks/{hook['id']}/deliveries", params=params)
        return [delivery["id"] for delivery in answer.json()["deliveries"]]

    first, *others = [await send(client, quiet), *[await send(client, loud) for _ in range(3)]]
    for _ in range(5):
        await send(stranger, foreign)
    assert (await listed(quiet), await listed(loud), await listed(loud, limit=2)) == (
        [first], others[::-1], others[:0:-1],
    )  # fmt: skip
    for searched, found in ((4, [first]), (3, [])):
        monkeypatch.setattr(endpoints, "_MAX_SEARCHED", searched, raising=False)
        assert (await listed(quiet), await listed(loud)) == (found, others[::-1])


async def test_each_ended_run_makes_one_delivery_however_many_dispatch(
    client: Client, runs_settings: Settings, receiver: Receiver, rows: Connection
) -> None:
    await subscribe(client, receiver.url)
    runs = [await client.start() for _ in range(5)]
    for run in runs:
        await client.post(f"/v1/runs/{run}/cancel")
    async with Worker(runs_settings), Worker(runs_settings):
        await receiver.hears(5)
        await asyncio.sleep(0.5)
    assert await rows.fetchval("SELECT count(*) FROM job WHERE pipeline = 'webhook'") == 5
    assert {json.loads(body)["data"]["id"] for _, body in receiver.heard} == set(runs)


async def test_an_installation_without_webhooks_says_that_it_sends_none(
    runs_settings: Settings, rows: Connection
) -> None:
    without = runs_settings.model_copy(update={"pipelines": "tests.runs.work:pipelines"})
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(without) as running, client_of(running.url, key.text) as http:
        hook = await subscribe(Client(http), "https://127.0.0.1/")
        said = problem(await http.post(f"/v1/webhooks/{hook['id']}/test"), 409, "webhook_disabled")
        assert said["detail"] == "This installation sends no webhooks."
        await http.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": False})
    async with serving(runs_settings) as running, client_of(running.url, key.text) as http:
        said = problem(await http.post(f"/v1/webhooks/{hook['id']}/test"), 409, "webhook_disabled")
        assert said["detail"] == "The webhook is disabled."


async def test_a_private_address_is_refused_and_so_is_another_tenants_webhook(
    client: Client, stranger: Client, receiver: Receiver
) -> None:
    for url in ("http://10.0.0.1/", "http://169.254.169.254/latest/meta-data/"):
        problem(await client.post("/v1/webhooks", url=url), 422, "address_private")
    hook = await subscribe(client, receiver.url)
    problem(await stranger.post(f"/v1/webhooks/{hook['id']}/rotate"), 404, "webhook_not_found")
    problem(await stranger.http.delete(f"/v1/webhooks/{hook['id']}"), 404, "webhook_not_found")
    assert (await client.http.delete(f"/v1/webhooks/{hook['id']}")).status_code == 204


async def test_a_tenant_with_silent_name_servers_keeps_nobody_else_from_a_webhook(
    client: Client, stranger: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tenants share the threads that resolve names. A silent name server holds one for half a minute."""
    asked, answer, resolve = list[str](), threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *arguments: Any, **more: Any) -> list[Any]:
        if not host.endswith(".example"):
            return list(resolve(host, port, *arguments, **more))
        asked.append(host)
        if host == "silent.example":
            answer.wait(120)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    silent = [asyncio.create_task(client.post("/v1/webhooks", url="https://silent.example/")) for _ in range(40)]
    try:
        async with asyncio.timeout(60):
            while value_of(IN_FLIGHT) < len(silent) or len(asked) < 4:
                await asyncio.sleep(0.01)
            hook = await subscribe(stranger, "https://quick.example/")
            answered = await stranger.http.patch(f"/v1/webhooks/{hook['id']}", json={"url": "https://other.example/"})
            assert answered.status_code == 200
    finally:
        answer.set()
    assert {made.status_code for made in await asyncio.gather(*silent)} <= {201, 503}
    await subscribe(client, "https://silent.example/")


async def test_a_webhook_whose_answer_would_be_too_late_for_its_secret_is_not_made(
    runs_settings: Settings, receiver: Receiver, rows: Connection, settings: Settings
) -> None:
    """Older jobs are locked, or very many. The webhook stood there without a secret that anybody knew."""
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(runs_settings) as running, client_of(running.url, key.text) as http:
        run = await Client(http).start()
    another = await connect(settings, "test")
    hurried = runs_settings.model_copy(update={"database_timeout": 1.0})
    async with serving(hurried) as running, client_of(running.url, key.text) as http, another.transaction():
        await another.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", UUID(run))
        problem(await http.post("/v1/webhooks", json={"url": receiver.url}), 503, "database_unavailable")
        assert await rows.fetchval("SELECT count(*) FROM webhook") == 0
    await another.close()
    async with serving(runs_settings) as running, client_of(running.url, key.text) as http:
        hook = await subscribe(Client(http), receiver.url)
        await http.post(f"/v1/runs/{run}/cancel")
    assert await deliveries(rows) == [(run, hook["id"])]


async def test_a_new_webhook_hears_also_of_a_run_that_was_submitted_while_it_was_made(
    client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, rows: Connection
) -> None:
    """The submission saw no webhook. So it asks nobody to report its end."""
    runs: list[str] = []

    async def submit_meanwhile(*arguments: Any) -> None:
        runs.append(await client.start())
        await check_room(*arguments)

    monkeypatch.setattr(endpoints, "check_room", submit_meanwhile)
    hook = await subscribe(client, receiver.url)
    assert (await client.post(f"/v1/runs/{runs[0]}/cancel")).is_success
    assert await deliveries(rows) == [(runs[0], hook["id"])]


async def test_what_is_left_to_do_after_a_webhook_is_made_takes_the_secret_from_nobody(
    client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the request counts only until the webhook is written."""
    left = list[bool]()

    async def look(*arguments: Any) -> None:
        left.append(deadline.current()._seconds_left is None)
        await watch(*arguments)

    monkeypatch.setattr("leasehold.transitions.webhooks.watch", look)
    await subscribe(client, receiver.url)
    assert left == [False, True]


async def test_without_a_sealing_key_no_secret_is_kept(
    runs_settings: Settings, rows: Connection, receiver: Receiver
) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    bare = runs_settings.model_copy(update={"sealing_keys": SecretStr("")})
    async with serving(bare) as running, client_of(running.url, key.text) as http:
        problem(await http.post("/v1/webhooks", json={"url": receiver.url}), 503, "sealing_not_configured")


async def test_a_secret_that_no_key_opens_any_more_is_an_error_that_the_log_explains(
    client: Client, receiver: Receiver, running: Running
) -> None:
    """An operator has dropped an old key too early. The answer names the log, which had nothing."""
    headers = {"Idempotency-Key": "k"}
    made = await client.http.post("/v1/webhooks", json={"url": receiver.url}, headers=headers)
    assert made.status_code == 201
    other_key = SecretStr(Fernet.generate_key().decode())
    running.services.settings = running.services.settings.model_copy(update={"sealing_keys": other_key})
    with capture_logs([merge_contextvars]) as lines:
        again = await client.http.post("/v1/webhooks", json={"url": receiver.url}, headers=headers)
    request_id = problem(again, 500, "internal_error")["request_id"]
    (line,) = [line for line in lines if line["event"] == "request failed unexpectedly"]
    assert (line["error"], line["request_id"]) == ("Unsealable", request_id)
    assert isinstance(line["exc_info"], Unsealable)


async def test_secrets_lie_sealed_in_the_database(client: Client, receiver: Receiver, rows: Connection) -> None:
    hook = await subscribe(client, receiver.url)
    (sealed,) = await rows.fetchval("SELECT secrets FROM webhook")
    assert base64.b64decode(hook["secret"].removeprefix("whsec_")) not in sealed


async def test_a_new_secret_is_answered_also_when_another_connection_still_leads_to_an_old_primary(
    client: Client, receiver: Receiver, rows: Connection, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old primary is a connection whose snapshot is older than the write: the next that the request would get."""
    secrets = "(SELECT secrets FROM webhook UNION ALL SELECT secrets FROM callback_secret) AS t"
    is_written, acquire = f"SELECT coalesce(sum(cardinality(secrets)), 0)::int FROM {secrets}", TenantPool.acquire
    old = await connect(running.services.settings, "tests")
    writing = [0]

    @asynccontextmanager
    async def acquire_after_a_failover(pool: TenantPool) -> AsyncIterator[Connection]:
        async with acquire(pool) as connection:
            yield old if await rows.fetchval(is_written) > writing[0] else connection

    monkeypatch.setattr(TenantPool, "acquire", acquire_after_a_failover)
    async with old.transaction(isolation="repeatable_read"):
        await old.execute("SELECT 1")
        hook = await subscribe(client, receiver.url)
    made = [hook]
    for path in (f"/v1/webhooks/{hook['id']}/rotate", "/v1/callbacks/secret", "/v1/callbacks/secret"):
        writing[0] = await rows.fetchval(is_written)
        async with old.transaction(isolation="repeatable_read"):
            await old.execute("SELECT 1")
            answer = await client.post(path)
        assert answer.is_success, answer.text
        made.append(answer.json())
    assert len({each["secret"] for each in made}) == 4
    await old.close()


async def test_a_rotation_that_is_committed_is_answered_however_much_of_its_time_is_over(
    client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know the new secret, and a further rotation drops the one that the receivers know."""
    hook = await subscribe(client, receiver.url)
    has_limit = list[bool]()

    def looking(act: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def look(*arguments: Any, **details: Any) -> Any:
            has_limit.append(deadline.current()._seconds_left is not None)
            return await act(*arguments, **details)

        return look

    for module, find in (("webhooks", find_webhook), ("callbacks", find_callback_secret)):
        monkeypatch.setattr(f"leasehold.api.runs.{module}.record", looking(record))
        monkeypatch.setattr(f"leasehold.transitions.{module}.find", looking(find))
    for path in (f"/v1/webhooks/{hook['id']}/rotate", "/v1/callbacks/secret"):
        assert (await client.post(path)).is_success
    assert has_limit == [True, False] * 2  # the write is in time, and the read has all the time that it needs


def test_sealing_keys_rotate_and_damage_is_found(settings: Settings) -> None:
    older, newer = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    sealed = Sealing(settings.model_copy(update={"sealing_keys": SecretStr(older)})).seal(b"secret")
    both = Sealing(settings.model_copy(update={"sealing_keys": SecretStr(f"{newer},{older}")}))
    assert both.open(sealed) == b"secret"
    with pytest.raises(Unsealable):
        both.open(sealed[:-4] + b"AAA=")
