"""What others write, callers and servers that were asked, costs no more than its length and ends in a known error."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from secrets import token_urlsafe
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from leasehold.api.http.strict_json import refusal
from leasehold.domain import cron
from leasehold.domain.errors import Invalid
from leasehold.pipelines.generation.providers.redaction import redacted
from leasehold.security.egress import Answer
from leasehold.settings import Settings
from leasehold.telemetry import redaction
from leasehold.worker.attempts import failures
from tests.api.conftest import Running
from tests.api.media_api import problem
from tests.runs.conftest import Client, client, running, runs_settings
from tests.security.test_schemas import Loop, loop

__all__ = ["client", "loop", "running", "runs_settings"]

STEP = {"id": "only", "worker_type": "external", "queue": "q"}
DEEP = b"[" * 150 + b"]" * 150
HUGE = b"1" + b"0" * 25
#: Values that Python's parser reads and that are no strict JSON, or that no column can hold.
LAX = [b"NaN", b"-Infinity", b"1e999", b"-1E+400", b"1" * 400 + b".0", b'"\\ud800"', b'{"\\udc00": 1}', b'"a\\uD83D"',
       b"1" * 250 + b"e99", b"[" + b"1" * 211 + b"E+99]", b'"\xed\xa0\x80"', b'{"\xed\xbf\xbf": 1}']  # fmt: skip
#: The doors that take JSON of any form, with a body around it.
DOORS = [
    ("POST", "/v1/runs", b'{"template": "scripted", "payload": {"a": %s}}'),
    ("POST", "/v1/runs/batch", b'{"template": "scripted", "runs": [{"payload": {"a": %s}}]}'),
    ("POST", "/v1/templates", b'{"type": "t", "steps": [{"id": "a"}], "payload_schema": {"const": %s}}'),
    ("POST", "/v1/templates", b'{"type": "t", "steps": [{"id": "a", "skip_if": {"pointer": "/a", "equals": %s}}]}'),
    ("POST", "/v1/schedules", b'{"template": "scripted", "cron": "@daily", "payload_template": {"a": %s}}'),
    ("PATCH", "/v1/schedules/%s" % ("0" * 8 + "-0000" * 3 + "-" + "0" * 12), b'{"payload_template": {"a": %s}}'),
    ("POST", "/v1/external/tasks/%s/complete" % ("0" * 8 + "-0000" * 3 + "-" + "0" * 12), b'{"result": {"a": %s}}'),
    ("PUT", "/v1/limits", b'{"at_most": %s}'),
    ("POST", "/upload-url", b"%s"),
]


async def send(client: Client, method: str, path: str, body: bytes) -> Any:
    return await client.http.request(method, path, content=body, headers={"Content-Type": "application/json"})


async def test_every_door_refuses_deep_nesting_and_integers_beyond_64_bits_by_name(client: Client, loop: Loop) -> None:
    for method, path, body in DOORS:
        problem(await send(client, method, path, body % DEEP), 422, "body_too_deep")
        problem(await send(client, method, path, body % HUGE), 422, "integer_too_large")
        problem(await send(client, method, path, body % (b"-" + HUGE)), 422, "integer_too_large")
        problem(await send(client, method, path, b"[" * 20_000), 422, "body_too_deep")
        for value in LAX:
            problem(await send(client, method, path, body % value), 400, "malformed_json")
        problem(await send(client, method, path, (body % b"1").decode().encode("utf-16")), 400, "malformed_json")
    answer = await send(client, "POST", "/v1/runs", DOORS[0][2] % (b"9" * 5000 + b".5"))  # a number, and odd
    assert answer.status_code in (202, 400, 422)
    assert loop.worst < 0.5


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b"[" * 500 + b'"}',
        b'{"a": "\\"' + b"{" * 500 + b'\\\\", "b": [1, 2]}',
        b"[" + b"[]," * 500 + b"[]]",
        b'["' + b"1" * 40 + b'"]',
        b"[18446744073709551615, -9223372036854775808]",
        b"[0.12345678901234567890123, 1e-12, 12345678901234567890123.5, 12345678901234567890123e2]",
        b"[1e-999, 1E308, 1e+300]",
        b'["NaN", "Infinity 1e999", "\\\\ud800", "\\ud83d\\ude00"]',
        b'{"a": "' + b"7" * 400 + b'"}',
    ],
)
def test_a_body_that_only_looks_deep_or_huge_or_lax_is_let_through(body: bytes) -> None:
    assert refusal(body, 100) is None


async def test_a_queue_name_that_no_index_could_hold_is_no_queue(client: Client) -> None:
    for act in ("pause", "resume"):
        problem(await client.post(f"/v1/queues/{token_urlsafe(6000)}/{act}"), 404, "not_found")
    assert (await client.post(f"/v1/queues/{'q' * 200}/pause")).status_code == 200


@pytest.mark.parametrize(("before", "after"), [(b'"', b""), (b"[", b".5]"), (b"[1.", b"e1]")])
@pytest.mark.parametrize(
    "piece",
    [
        b'"', b'\\"', b"[", b"[]", b'["a[","b"],', b"1234567890123456789,", b'"\\', b"NaN,", b"1e999,",
        b"\\ud83d\\ude00", b"1", b"-1", b"1" * 199 + b",", b"1e1", b"\xed\xa0",
    ],
)  # fmt: skip
def test_looking_at_a_body_costs_its_length_and_not_its_square(piece: bytes, before: bytes, after: bytes) -> None:
    def seconds(size: int) -> float:
        body = before + piece * (size // len(piece)) + after
        began = time.thread_time()
        refusal(body, 100)
        return time.thread_time() - began

    assert min(seconds(512 * 1024) for _ in range(3)) < 40 * max(min(seconds(32 * 1024) for _ in range(3)), 0.0005)


async def test_a_backfill_from_the_year_1_and_a_time_out_of_range_are_refused(client: Client) -> None:
    for zone in ("UTC", "America/New_York", "Asia/Tokyo"):
        made = await client.post("/v1/schedules", template="scripted", cron="0 0 29 2 */7", timezone=zone)
        path = f"/v1/schedules/{made.json()['id']}/backfill"
        for start in ("0001-01-01T00:00:00Z", "1900-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00"):
            answer = await client.post(path, start=start, end="2020-01-01T00:00:00Z")
            problem(answer, 422, "invalid_request")  # beyond the calendar
        answer = await client.post(path, start="1971-01-01T00:00:00Z", end="2020-01-01T00:00:00Z")
        problem(answer, 422, "range_too_long")


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
@pytest.mark.parametrize("when", [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
def test_at_the_ends_of_time_a_schedule_fires_no_more_or_says_so(zone: str, when: datetime) -> None:
    with suppress(Invalid):  # there is no such instant in that zone
        found = cron.next_after("0 0 1 1 *", zone, when)
        assert found is None or found > when


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 29 2 */7",
        "0 0 31 2 1#5",
        "0 0 L 2 */6",
        "0 0 LW * */5",
        "59 23 29 2 7L",
        ",".join(["0-59"] * 30) + " * * * *",
    ],
)
def test_what_fires_seldom_is_found_in_bounded_time(expression: str) -> None:
    before = time.thread_time()
    cron.next_after(expression, "Europe/Berlin", datetime(2026, 1, 1, tzinfo=UTC))
    assert time.thread_time() - before < 0.5


async def test_a_list_of_schedules_that_fire_seldom_lets_others_in_between(client: Client, loop: Loop) -> None:
    for _ in range(30):
        made = await client.post("/v1/schedules", template="scripted", cron="0 0 29 2 */7")
        assert made.status_code == 201
    worst = []
    for _ in range(3):  # the processor may be slow for a moment
        loop.worst = 0.0
        assert len((await client.http.get("/v1/schedules?limit=100")).json()["schedules"]) == 30
        worst.append(loop.worst)
    assert min(worst) < 0.1  # all together take longer


async def test_a_batch_of_many_steps_is_bounded_by_its_tasks(client: Client, running: Running) -> None:
    steps = [STEP | {"id": f"s{n}", "needs": []} for n in range(100)]
    assert (await client.post("/v1/templates", type="wide", steps=steps)).status_code == 201
    at_most = running.services.settings.batch_max_tasks // 100
    said = await client.post("/v1/runs/batch", template="wide", runs=[{}] * (at_most + 1))
    assert str(at_most) in problem(said, 422, "batch_too_large")["detail"]
    assert (await client.post("/v1/runs/batch", template="wide", runs=[{}] * at_most)).status_code == 202


async def test_a_pointer_has_a_bounded_number_of_parts(client: Client) -> None:
    step = STEP | {"skip_if": {"pointer": "/a" * 33}}
    problem(await client.post("/v1/templates", type="t", steps=[step]), 422, "invalid_request")
    step = STEP | {"skip_if": {"pointer": "/a" * 32}}
    assert (await client.post("/v1/templates", type="t", steps=[step])).status_code == 201


def test_what_a_provider_says_of_an_error_is_searched_in_bounded_time() -> None:
    before = time.thread_time()
    told = redacted("http://" * 150_000 + " key:secret", "key:secret")
    assert time.thread_time() - before < 0.5
    assert "secret" not in told
    assert "s3cret" not in redacted("x" * 1990 + "https://a.example/?s3cret", "k")


@pytest.mark.parametrize("kept", [4, 8, 13, 15])
def test_a_credential_that_a_cut_halves_is_not_in_a_providers_error(kept: int) -> None:
    credential = "access-key:very-secret-key"
    for part in (credential, "very-secret-key"):
        assert redacted(f"refused: {part[:kept]}", credential) == "refused: ***"
    assert redacted("refused: ver", credential) == "refused: ver"


@pytest.mark.parametrize("limit", [failures._MAX_MESSAGE, failures._MAX_CODE])
def test_a_secret_that_a_cut_halves_is_not_in_a_failure(limit: int) -> None:
    redaction.learn(Settings(_env_file=None, s3_secret_key=SecretStr("correct-horse-battery")))
    try:
        stored = failures._storable("x" * (limit - 10) + "correct-horse-battery", limit)
        assert "correct" not in stored
        assert len(stored) == limit
    finally:
        redaction.learn(Settings(_env_file=None))


@pytest.mark.parametrize(
    "said",
    [
        "9" * 400, "9" * 5000, "\u0663", "-1", "soon", "",
        "Mon, 01 Jan 0001 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 -0000", "Mon, 01 Jan 99999999999 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 -1200",
    ],
)  # fmt: skip
def test_a_retry_after_of_any_form_is_at_most_a_day_or_none(said: str) -> None:
    after = Answer(503, {"retry-after": said}, b"").retry_after()
    assert after is None or 0 <= after <= 86_400


async def test_a_template_that_is_deep_only_by_its_schema_is_refused_as_any_body(client: Client) -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"properties": {"a": schema}}
    body = orjson.dumps({"type": "t", "steps": [STEP], "payload_schema": schema})
    problem(await send(client, "POST", "/v1/templates", body), 422, "body_too_deep")
