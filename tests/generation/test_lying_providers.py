"""Whatever a provider says, it ends in a known error, and no error tells what is secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from leasehold.domain.storable import encode_storable
from leasehold.pipelines.generation.pipeline import GenerationParams
from leasehold.pipelines.generation.provider import (
    Accepted,
    Finished,
    NoAccess,
    Order,
    OutcomeUnknown,
    ProviderError,
    Rejected,
    TryLater,
)
from leasehold.pipelines.generation.providers import open_providers
from leasehold.pipelines.generation.providers.requests import urls_in
from leasehold.pipelines.generation.steps import _retry_delay
from leasehold.settings import Settings
from tests.generation.conftest import CREDENTIALS
from tests.generation.simulator.http import HttpServer, Reply, Request
from tests.generation.simulator.protocols import BEARER, SECRET_KEY, gateway_declaration

ORDER = Order(kind="image", token="t-1", prompt="a cat", model="o/m")


def settings(url: str) -> Settings:
    return Settings(
        _env_file=None, egress_allow="127.0.0.0/8", generation_jimeng_url=url, generation_ark_url=url,
        generation_replicate_url=url, generation_fal_url=url, generation_http_providers=gateway_declaration(url),
    )  # fmt: skip


def saying(reply: Reply) -> Callable[[Request], Awaitable[Reply]]:
    async def answer(_request: Request) -> Reply:
        return reply

    return answer


@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal", "gateway"])
async def test_a_credential_that_a_provider_quotes_goes_no_further(name: str) -> None:
    quoted = f"bad key {CREDENTIALS[name]} or {CREDENTIALS[name].split(':')[-1]}, see https://a.example/x?sign=s3cret"
    said = {"code": 50400, "message": quoted, "detail": quoted, "error": {"code": CREDENTIALS[name], "message": quoted}}
    async with HttpServer(saying(Reply(400, said))) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(Rejected) as caught:
            await providers[name].submit(ORDER, CREDENTIALS[name])
    told = f"{caught.value!r} {caught.value} {caught.value.message} {caught.value.fail_code}"
    assert "***" in told
    assert "https://a.example/x" in told
    assert not [secret for secret in (BEARER, SECRET_KEY, "s3cret") if secret in told]


@pytest.mark.parametrize(("status", "error"), [(429, TryLater), (500, OutcomeUnknown), (400, Rejected)])
@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal", "gateway"])
async def test_no_error_of_a_provider_has_what_a_note_cannot_store(
    name: str, status: int, error: type[ProviderError]
) -> None:
    """The poll of an order writes such an error into its note, and asks again."""
    secret = CREDENTIALS[name].rpartition(":")[2]
    text = f"odd \x00 words {secret[:4]}\x00{secret[4:]}"
    said = {"message": text, "detail": text, "error": {"code": "o\x00dd", "message": text}}
    async with HttpServer(saying(Reply(status, said))) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(error) as caught:
            await providers[name].poll("7", ORDER, CREDENTIALS[name])
    assert "words ***" in caught.value.message
    encode_storable([caught.value.message, str(caught.value), caught.value.fail_code])


@pytest.mark.parametrize("code", [[], {}, "10000", None])
async def test_jimengs_good_answer_without_a_code_leaves_the_outcome_unknown(code: Any) -> None:
    reply = Reply(said={"code": code, "data": {"task_id": "7"}})
    async with HttpServer(saying(reply)) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(OutcomeUnknown) as caught:
            await providers["jimeng"].submit(ORDER, CREDENTIALS["jimeng"])
    assert caught.value.code == "provider_bad_answer"


@pytest.mark.parametrize("error", ["it broke", ["it broke"], None])
async def test_a_failed_task_of_ark_has_failed_in_whatever_form_it_says_why(error: Any) -> None:
    reply = Reply(said={"status": "failed", "error": error})
    async with HttpServer(saying(reply)) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(Rejected) as caught:
            await providers["ark"].poll("cgt-1", ORDER, CREDENTIALS["ark"])
    assert (caught.value.code, caught.value.fail_code) == ("provider_failed", "failed")


@pytest.mark.parametrize(
    ("reply", "error", "code"),
    [
        (Reply(429, {"detail": "slow down"}), TryLater, "provider_busy"),
        (Reply(500, {"detail": "oops"}), OutcomeUnknown, "provider_error"),
        (Reply(307), OutcomeUnknown, "provider_error"),
        (Reply(399, {"detail": "moved"}), OutcomeUnknown, "provider_error"),
        (Reply(400, {"detail": "no"}), Rejected, "provider_failed"),
        (Reply(404, {"detail": "no"}), Rejected, "provider_refused"),
        (Reply(408, {"detail": "no"}), OutcomeUnknown, "provider_error"),
        (Reply(499, {"detail": "no"}), Rejected, "provider_failed"),
        (Reply(401, {"detail": "no"}), NoAccess, "provider_unauthorized"),
        (Reply(422, {"detail": "no"}), Rejected, "provider_failed"),
        (Reply(422, ["odd"]), Rejected, "provider_failed"),
        (Reply(said=["odd"]), OutcomeUnknown, "provider_bad_answer"),
        (Reply(said={"prompt": "https://a.example/prompt", "images": []}), Rejected, "provider_no_files"),
    ],
)
async def test_a_result_of_fal_that_cannot_be_read_now_is_no_failure_of_its_model(
    reply: Reply, error: type[ProviderError], code: str
) -> None:
    async def answer(request: Request) -> Reply:
        return Reply(said={"status": "COMPLETED"}) if request.path.endswith("/status") else reply

    async with HttpServer(answer) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(error) as caught:
            await providers["fal"].poll("r-1", ORDER, CREDENTIALS["fal"])
    assert (type(caught.value), caught.value.code) == (error, code)


async def test_a_picture_that_ark_refused_is_no_file_beside_the_others() -> None:
    link = "https://a.example/1.png"
    refused = {"error": {"code": "OutputImageSensitiveContentDetected", "message": "no"}}
    reply = Reply(said={"data": [{"url": link}, refused]})
    async with HttpServer(saying(reply)) as server, open_providers(settings(server.url)) as providers:
        assert await providers["ark"].submit(ORDER, CREDENTIALS["ark"]) == Finished((link,))


@pytest.mark.parametrize("ref", ["a\x00b", "", None, True, ["a"]])
@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal", "gateway"])
async def test_an_order_without_an_id_that_can_be_kept_has_an_unknown_outcome(name: str, ref: Any) -> None:
    """It may be paid for: a person settles it."""
    said = {"code": 10000, "id": ref, "request_id": ref, "data": {"task_id": ref, "task": ref}}
    async with HttpServer(saying(Reply(said=said))) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(OutcomeUnknown) as caught:
            await providers[name].submit(replace(ORDER, kind="video"), CREDENTIALS[name])
    assert caught.value.code == "provider_bad_answer"


async def test_a_declared_provider_may_count_its_orders() -> None:
    reply = Reply(said={"data": {"task": 17}})
    async with HttpServer(saying(reply)) as server, open_providers(settings(server.url)) as providers:
        assert await providers["gateway"].submit(ORDER, CREDENTIALS["gateway"]) == Accepted("17")


def test_a_link_that_cannot_be_kept_takes_no_other_along() -> None:
    assert urls_in(["https://a.example/1", "https://a.example/\x00", "https://a.example/2"]) == (
        "https://a.example/1",
        "https://a.example/2",
    )


def test_links_are_found_in_order_however_deep_and_other_texts_are_none() -> None:
    deep = orjson.loads(b"[" * 900 + b'"https://a.example/deep"' + b"]" * 900)
    found = {"a": ["https://a.example/1", "text"], "b": {"url": "https://a.example/2"}, "c": deep}
    assert urls_in(found) == ("https://a.example/1", "https://a.example/2", "https://a.example/deep")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("said", "least"), [("7", 7.0), ("Fri, 01 Jan 2100 00:00:00 GMT", 86_400.0)])
async def test_a_provider_that_says_when_to_come_back_is_heard(status: int, said: str, least: float) -> None:
    reply = Reply(status, {"detail": "busy"}, headers={"retry-after": said})
    async with HttpServer(saying(reply)) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(TryLater) as caught:
            await providers["replicate"].submit(ORDER, CREDENTIALS["replicate"])
    assert caught.value.after is not None
    assert caught.value.after >= least


@pytest.mark.parametrize(("after", "least"), [(0.0, 15.0), (14.0, 15.0), (60.0, 60.0), (1e9, 600.0), (None, 15.0)])
def test_a_provider_may_lengthen_the_pause_and_not_shorten_it(after: float | None, least: float) -> None:
    """A provider that always answers 0 would otherwise get requests in a loop until the deadline."""
    deadline = datetime.now(UTC) + timedelta(days=30)
    params = GenerationParams(kind="image", provider="ark", prompt="a", deadline_at=deadline, poll_seconds=15.0)
    delay = _retry_delay(params, TryLater("provider_busy", "busy", after=after), 1, 30 * 86_400.0)
    assert timedelta(seconds=least) <= delay <= timedelta(days=2)


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, Rejected, "provider_refused"),
        (401, NoAccess, "provider_unauthorized"),
        (402, NoAccess, "provider_payment_required"),
        (403, NoAccess, "provider_unauthorized"),
        (404, Rejected, "provider_refused"),
        (422, Rejected, "provider_refused"),
        (307, OutcomeUnknown, "provider_error"),
        (399, OutcomeUnknown, "provider_error"),
        (408, OutcomeUnknown, "provider_error"),
        (502, OutcomeUnknown, "provider_error"),
        (503, OutcomeUnknown, "provider_error"),
    ],
)
@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal", "gateway"])
async def test_a_status_means_the_same_of_every_provider(
    name: str, status: int, error: type[ProviderError], code: str
) -> None:
    async with HttpServer(saying(Reply(status, {}))) as server, open_providers(settings(server.url)) as providers:
        with pytest.raises(error) as caught:
            await providers[name].submit(ORDER, CREDENTIALS[name])
    assert (type(caught.value), caught.value.code) == (error, code)
