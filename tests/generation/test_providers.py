"""What each provider is told, and what becomes of whatever it answers: over real HTTP, in its documented words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from prometheus_client import REGISTRY

from leasehold.domain.errors import DeclarationError
from leasehold.pipelines.generation.metrics import measured
from leasehold.pipelines.generation.provider import (
    Accepted,
    Finished,
    Kind,
    NoAccess,
    Order,
    OutcomeUnknown,
    ProviderError,
    Rejected,
    SourceImage,
    TryLater,
    Working,
)
from leasehold.pipelines.generation.providers import Catalogue, Providers, open_providers
from leasehold.pipelines.generation.providers.ark import Ark
from leasehold.pipelines.generation.providers.declared import Declared, _fill, declarations
from leasehold.pipelines.generation.providers.requests import ProviderAnswer, RequestSender
from leasehold.settings import Settings
from tests.generation.conftest import CREDENTIALS
from tests.generation.simulator.server import Simulator

ASYNCHRONOUS: list[tuple[str, Kind]] = [
    ("jimeng", "image"), ("jimeng", "video"), ("ark", "video"), ("replicate", "image"), ("fal", "image"),
    ("gateway", "image"),
]  # fmt: skip
#: A model that the provider has for it, where it needs one.
MODELS = {"ark": "doubao-seedance-1-0-pro", "replicate": "black-forest-labs/flux", "fal": "fal-ai/flux/dev"}


@pytest.fixture
async def providers(simulator: Simulator) -> AsyncIterator[Providers]:
    async with open_providers(Settings(_env_file=None).model_copy(update=simulator.settings())) as opened:
        yield opened


def order(provider: str, kind: Kind, prompt: str, **more: Any) -> Order:
    return Order(kind=kind, token="t-1", prompt=prompt, **({"model": MODELS.get(provider)} | more))


@pytest.mark.parametrize(("name", "kind"), ASYNCHRONOUS)
async def test_a_generation_is_taken_worked_on_and_made(providers: Providers, name: str, kind: Kind) -> None:
    provider, wanted = providers[name], order(name, kind, "a cat #files=1")
    taken = await provider.submit(wanted, CREDENTIALS[name])
    assert isinstance(taken, Accepted)
    assert isinstance(await provider.poll(taken.ref, wanted, CREDENTIALS[name]), Working)
    made = await provider.poll(taken.ref, wanted, CREDENTIALS[name])
    assert isinstance(made, Finished)
    assert len(made.urls) == 1


async def test_ark_answers_with_images_at_once(providers: Providers) -> None:
    said = await providers["ark"].submit(order("ark", "image", "two #files=2"), CREDENTIALS["ark"])
    assert isinstance(said, Finished)
    assert len(said.urls) == 2


@pytest.mark.parametrize(("name", "kind"), ASYNCHRONOUS)
@pytest.mark.parametrize(
    ("prompt", "error", "code"),
    [
        ("#busy=1", TryLater, "provider_busy"),
        ("#down=1", OutcomeUnknown, "provider_error"),
        ("#lost", OutcomeUnknown, "provider_no_answer"),
        ("#garbled", OutcomeUnknown, "provider_bad_answer"),
    ],
)
async def test_what_a_submission_may_meet(
    providers: Providers, name: str, kind: Kind, prompt: str, error: type[ProviderError], code: str
) -> None:
    with pytest.raises(error) as said:
        await providers[name].submit(order(name, kind, f"a cat {prompt}"), CREDENTIALS[name])
    assert said.value.code == code
    assert CREDENTIALS[name] not in str(said.value)


@pytest.mark.parametrize(("name", "kind"), ASYNCHRONOUS)
@pytest.mark.parametrize(
    ("prompt", "error", "code"),
    [
        ("#work=0 #ill=1", OutcomeUnknown, "provider_error"),
        ("#odd", OutcomeUnknown, "provider_bad_answer"),
        ("#nofiles #work=0", Rejected, "provider_no_files"),
    ],
)
async def test_what_a_poll_may_meet(
    providers: Providers, name: str, kind: Kind, prompt: str, error: type[ProviderError], code: str
) -> None:
    provider, wanted = providers[name], order(name, kind, f"a cat {prompt}")
    taken = await provider.submit(wanted, CREDENTIALS[name])
    assert isinstance(taken, Accepted)
    with pytest.raises(error) as said:
        await provider.poll(taken.ref, wanted, CREDENTIALS[name])
    assert said.value.code == code


@pytest.mark.parametrize(
    ("name", "kind", "prompt", "code", "fail_code"),
    [
        ("jimeng", "image", "#fail=50511", "output_refused", "50511"),
        ("jimeng", "image", "#fail=50412", "content_refused", "50412"),
        ("jimeng", "image", "#fail=59999", "provider_refused", "59999"),
        ("ark", "video", "#fail=OutputVideoSensitiveContentDetected", "provider_failed",
         "OutputVideoSensitiveContentDetected"),
        ("replicate", "image", "#fail=1", "provider_failed", "failed"),
        ("fal", "image", "#fail=image_too_large", "provider_failed", "image_too_large"),
        ("fal", "image", "#fail=content_policy_violation", "content_refused", "content_policy_violation"),
        ("fal", "image", "#fail=runner_disconnected", "provider_failed", "runner_disconnected"),
        ("gateway", "image", "#fail=E7", "provider_failed", "E7"),
    ],
)  # fmt: skip
async def test_a_generation_that_failed_says_why_in_the_providers_own_code(
    providers: Providers, name: str, kind: Kind, prompt: str, code: str, fail_code: str
) -> None:
    provider, wanted = providers[name], order(name, kind, prompt)
    taken = await provider.submit(wanted, CREDENTIALS[name])
    assert isinstance(taken, Accepted)
    await provider.poll(taken.ref, wanted, CREDENTIALS[name])
    with pytest.raises(Rejected) as said:
        await provider.poll(taken.ref, wanted, CREDENTIALS[name])
    assert (said.value.code, said.value.fail_code) == (code, fail_code)


@pytest.mark.parametrize("code", ["50500", "50501"])
async def test_jimengs_own_trouble_ends_nothing_that_was_bought(providers: Providers, code: str) -> None:
    provider, wanted = providers["jimeng"], order("jimeng", "image", f"#fail={code} #work=0")
    taken = await provider.submit(wanted, CREDENTIALS["jimeng"])
    assert isinstance(taken, Accepted)
    with pytest.raises(OutcomeUnknown) as said:
        await provider.poll(taken.ref, wanted, CREDENTIALS["jimeng"])
    assert said.value.fail_code == code


async def test_refused_content_is_not_bought(providers: Providers, simulator: Simulator) -> None:
    with pytest.raises(Rejected) as said:
        await providers["jimeng"].submit(order("jimeng", "image", "#refused"), CREDENTIALS["jimeng"])
    assert (said.value.code, said.value.fail_code) == ("content_refused", "50411")
    assert simulator.bought == []


@pytest.mark.parametrize(("name", "kind"), ASYNCHRONOUS)
async def test_a_wrong_credential_is_refused_and_never_told(providers: Providers, name: str, kind: Kind) -> None:
    wrong = "AKwrong:s3cret" if name == "jimeng" else "s3cret"
    with pytest.raises(NoAccess) as said:
        await providers[name].submit(order(name, kind, "x"), wrong)
    assert said.value.code == "provider_unauthorized"
    assert "s3cret" not in f"{said.value} {said.value.message}"


async def test_a_credential_of_the_wrong_form_goes_nowhere(providers: Providers, simulator: Simulator) -> None:
    with pytest.raises(NoAccess, match="access key:secret key"):
        await providers["jimeng"].submit(order("jimeng", "image", "x"), "no colon")
    assert simulator.requests == []


@pytest.mark.parametrize(("name", "kind"), ASYNCHRONOUS)
async def test_a_generation_unknown_there_will_never_be_made(providers: Providers, name: str, kind: Kind) -> None:
    with pytest.raises(Rejected):
        await providers[name].poll("nobody", order(name, kind, "x"), CREDENTIALS[name])


@pytest.mark.parametrize(
    ("name", "kind", "stopped"),
    [
        ("jimeng", "image", False),
        ("ark", "video", True),
        ("replicate", "image", True),
        ("fal", "image", True),
        ("gateway", "image", True),
    ],
)
async def test_who_can_be_told_to_stop_is(
    providers: Providers, simulator: Simulator, name: str, kind: Kind, *, stopped: bool
) -> None:
    provider, wanted = providers[name], order(name, kind, "#never")
    taken = await provider.submit(wanted, CREDENTIALS[name])
    assert isinstance(taken, Accepted)
    assert await provider.cancel(taken.ref, wanted, CREDENTIALS[name]) is stopped
    assert simulator.bought[0].cancelled is stopped


async def test_ark_does_not_stop_what_runs(providers: Providers) -> None:
    provider, wanted = providers["ark"], order("ark", "video", "#never")
    taken = await provider.submit(wanted, CREDENTIALS["ark"])
    assert isinstance(taken, Accepted)
    await provider.poll(taken.ref, wanted, CREDENTIALS["ark"])
    assert not await provider.cancel(taken.ref, wanted, CREDENTIALS["ark"])


@pytest.mark.parametrize(("name", "kind"), [("ark", "video"), ("replicate", "image"), ("fal", "image")])
async def test_a_cancel_with_a_revoked_key_is_no_answer_about_the_order(
    providers: Providers, name: str, kind: Kind
) -> None:
    provider, wanted = providers[name], order(name, kind, "#never")
    taken = await provider.submit(wanted, CREDENTIALS[name])
    assert isinstance(taken, Accepted)
    with pytest.raises(NoAccess) as refused:
        await provider.cancel(taken.ref, wanted, "revoked")
    assert refused.value.code == "provider_unauthorized"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *((status, True) for status in (200, 204)),
        *((status, False) for status in (400, 404, 405, 409, 410, 422)),
        (418, Rejected),
        *((status, NoAccess) for status in (401, 402, 403)),
        *((status, OutcomeUnknown) for status in (302, 399, 408, 500, 502)),
        (429, TryLater),
    ],
)
def test_only_an_answer_about_the_order_says_whether_a_cancel_stopped_it(
    status: int, outcome: bool | type[ProviderError]
) -> None:
    answer = ProviderAnswer(status, None, None)
    if isinstance(outcome, bool):
        assert answer.stopped() is outcome
    else:
        with pytest.raises(outcome) as raised:
            answer.stopped()
        assert type(raised.value) is outcome


@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal", "gateway"])
async def test_a_credential_that_no_header_can_have_buys_nothing(
    providers: Providers, simulator: Simulator, name: str
) -> None:
    """The outcome is known, so the order does not wait for a person who looks for it at the provider."""
    with pytest.raises(NoAccess) as said:
        await providers[name].submit(order(name, "image", "x", model="o/m"), "clé:secret")
    assert said.value.code == "header_malformed"
    assert simulator.bought == []


@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal", "gateway"])
async def test_a_provider_whose_name_server_is_silent_has_sold_nothing(
    providers: Providers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def silent(*_arguments: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("leasehold.security.egress._resolve", silent)
    with pytest.raises(TryLater) as said:
        await providers[name].submit(order(name, "image", "x", model="o/m"), CREDENTIALS[name])
    assert said.value.code == "provider_unreachable"


@pytest.mark.parametrize("name", ["jimeng", "ark", "replicate", "fal"])
async def test_a_provider_that_is_not_there_has_sold_nothing(name: str) -> None:
    nobody = {f"generation_{name}_url": "http://127.0.0.1:9", "egress_allow": "127.0.0.0/8"}
    async with open_providers(Settings(_env_file=None).model_copy(update=nobody)) as providers:
        with pytest.raises(TryLater) as said:
            await providers[name].submit(order(name, "image", "x", model="o/m"), CREDENTIALS[name])
    assert said.value.code == "provider_unreachable"


@pytest.mark.parametrize("name", ["ark", "replicate", "fal"])
async def test_who_chooses_no_model_asks_for_one(providers: Providers, name: str) -> None:
    with pytest.raises(Rejected) as said:
        await providers[name].submit(order(name, "image", "x", model=None), CREDENTIALS[name])
    assert said.value.code == "model_required"


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(None, None), (1, 1), (499, 1), (1499, 1), (1501, 2), (5000, 5), (600_000, 600)]
)
def test_a_duration_in_whole_seconds_is_never_zero(milliseconds: int | None, seconds: int | None) -> None:
    assert order("ark", "video", "p", duration_ms=milliseconds).whole_seconds == seconds


WHOLE: dict[str, Any] = {
    "negative_prompt": "blur", "width": 1024, "height": 768, "sample_strength": 0.6, "duration_ms": 5000,
    "ratio": "16:9", "images": (SourceImage("https://example.com/a.png"), SourceImage("https://example.com/b.png")),
    "deadline_seconds": 600, "extra": {"seed": 7}, "callback": "https://api.example/tell",
}  # fmt: skip

#: What the documentation that each adapter names asks for.
RECORDS: dict[tuple[str, Kind], tuple[str, str, dict[str, Any]]] = {
    ("jimeng", "image"): ("POST", "/", {
        "req_key": "jimeng_t2i_v40", "prompt": "p", "width": 1024, "height": 768, "scale": 0.6, "seed": 7,
        "image_urls": ["https://example.com/a.png", "https://example.com/b.png"],
    }),
    ("jimeng", "video"): ("POST", "/", {
        "req_key": "jimeng_ti2v_v30_pro", "prompt": "p", "frames": 121, "aspect_ratio": "16:9", "seed": 7,
        "image_urls": ["https://example.com/a.png", "https://example.com/b.png"],
    }),
    ("ark", "image"): ("POST", "/api/v3/images/generations", {
        "model": "m", "prompt": "p", "size": "1024x768", "response_format": "url", "seed": 7,
        "image": ["https://example.com/a.png", "https://example.com/b.png"],
    }),
    ("ark", "video"): ("POST", "/api/v3/contents/generations/tasks", {
        "model": "m", "ratio": "16:9", "duration": 5, "execution_expires_after": 3600, "seed": 7,
        "callback_url": "https://api.example/tell",
        "content": [
            {"type": "text", "text": "p"},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}, "role": "first_frame"},
            {"type": "image_url", "image_url": {"url": "https://example.com/b.png"}, "role": "last_frame"},
        ],
    }),
    ("replicate", "image"): ("POST", "/v1/models/o/m/predictions", {
        "input": {
            "prompt": "p", "negative_prompt": "blur", "width": 1024, "height": 768, "prompt_strength": 0.6,
            "image": "https://example.com/a.png", "aspect_ratio": "16:9", "duration": 5, "seed": 7,
        },
        "webhook": "https://api.example/tell", "webhook_events_filter": ["completed"],
    }),
    ("fal", "image"): ("POST", "/fal/o/m/edit", {
        "prompt": "p", "negative_prompt": "blur", "image_size": {"width": 1024, "height": 768}, "strength": 0.6,
        "image_urls": ["https://example.com/a.png", "https://example.com/b.png"], "aspect_ratio": "16:9",
        "duration": "5", "seed": 7,
    }),
    ("gateway", "image"): ("POST", "/gateway/tasks", {
        "prompt": "p", "kind": "image", "size": {"w": 1024, "h": 768}, "seed": 7, "tell": "https://api.example/tell",
    }),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), RECORDS)
async def test_an_order_goes_out_in_the_words_of_the_documentation(
    providers: Providers, simulator: Simulator, name: str, kind: Kind
) -> None:
    models = {"ark": "m", "replicate": "o/m", "fal": "o/m/edit"}
    await providers[name].submit(order(name, kind, "p", **WHOLE, model=models.get(name)), CREDENTIALS[name])
    (request,) = simulator.requests
    assert (request.method, request.path, request.json) == RECORDS[name, kind]
    assert request.headers["content-type"] == "application/json"
    if name == "replicate":
        assert request.headers["cancel-after"] == "600s"
    if name == "fal":
        assert request.headers["x-fal-request-timeout"] == "600"
        assert request.query == {"fal_webhook": "https://api.example/tell"}
    if name == "gateway":
        assert request.headers["idempotency-key"] == "t-1"


async def test_jimeng_is_asked_for_a_task_of_the_model_that_it_got(providers: Providers, simulator: Simulator) -> None:
    """A field of `extra` replaces a field of the order, also its model."""
    wanted = order("jimeng", "image", "p", model="jimeng_t2i_v30", extra={"req_key": "jimeng_t2i_v31"})
    taken = await providers["jimeng"].submit(wanted, CREDENTIALS["jimeng"])
    assert isinstance(taken, Accepted)
    await providers["jimeng"].poll(taken.ref, wanted, CREDENTIALS["jimeng"])
    assert [request.json["req_key"] for request in simulator.requests] == ["jimeng_t2i_v31"] * 2


async def test_replicate_is_not_asked_to_call_where_it_would_not(providers: Providers, simulator: Simulator) -> None:
    wanted = order("replicate", "image", "p", callback="http://api.example/tell")
    assert isinstance(await providers["replicate"].submit(wanted, CREDENTIALS["replicate"]), Accepted)
    assert "webhook" not in simulator.requests[0].json


async def test_fal_is_not_asked_to_call_where_it_would_not_and_gets_one_picture_by_its_own_name(
    providers: Providers, simulator: Simulator
) -> None:
    one = (SourceImage("https://example.com/a.png"),)
    wanted = order("fal", "image", "p", callback="http://api.example/tell", images=one, width=512)
    assert isinstance(await providers["fal"].submit(wanted, CREDENTIALS["fal"]), Accepted)
    (request,) = simulator.requests
    assert (request.query, request.json) == ({}, {"prompt": "p", "image_url": "https://example.com/a.png"})


@pytest.mark.parametrize(
    ("model", "path"),
    [("o/m", "/fal/o/m"), ("o/m/fast/edit", "/fal/o/m"), ("workflows/o/m/fast", "/fal/workflows/o/m")],
)
async def test_fal_is_asked_for_a_request_under_the_owner_and_the_app(
    providers: Providers, simulator: Simulator, model: str, path: str
) -> None:
    wanted = order("fal", "image", "p", model=model)
    with pytest.raises(Rejected):
        await providers["fal"].poll("a/b", wanted, CREDENTIALS["fal"])
    assert [request.path for request in simulator.requests] == [f"{path}/requests/a%2Fb/status"]


@pytest.mark.parametrize("model", ["m", "o/", "/m", "o//m", "o/../m", "workflows/o"])
async def test_a_model_that_is_none_of_fal_is_refused_before_anything_is_sent(
    providers: Providers, simulator: Simulator, model: str
) -> None:
    for call in (
        providers["fal"].submit(order("fal", "image", "p", model=model), CREDENTIALS["fal"]),
        providers["fal"].poll("r", order("fal", "image", "p", model=model), CREDENTIALS["fal"]),
    ):
        with pytest.raises(Rejected) as refused:
            await call
        assert refused.value.code == "model_required"
    assert simulator.requests == []


@pytest.mark.parametrize("model", ["../m", "o/..", "./m", "/m", "o/", "o/../predictions"])
async def test_a_model_that_is_none_of_replicate_is_refused_before_anything_is_sent(
    providers: Providers, simulator: Simulator, model: str
) -> None:
    """It would lead the installation's credential to another endpoint."""
    with pytest.raises(Rejected) as refused:
        await providers["replicate"].submit(order("replicate", "image", "p", model=model), CREDENTIALS["replicate"])
    assert refused.value.code == "model_required"
    assert simulator.requests == []


async def test_a_version_of_replicate_is_named_in_the_body(providers: Providers, simulator: Simulator) -> None:
    await providers["replicate"].submit(order("replicate", "image", "p", model="o/m:5c7d"), CREDENTIALS["replicate"])
    assert (simulator.requests[0].path, simulator.requests[0].json["version"]) == ("/v1/predictions", "5c7d")


async def test_a_declared_provider_that_promises_it_sells_once_for_a_token(
    providers: Providers, simulator: Simulator
) -> None:
    provider, wanted = providers["gateway"], order("gateway", "image", "#lost")
    assert provider.honours_token
    with pytest.raises(OutcomeUnknown):
        await provider.submit(wanted, CREDENTIALS["gateway"])
    again = await provider.submit(wanted, CREDENTIALS["gateway"])
    assert isinstance(again, Accepted)
    assert [one.id for one in simulator.bought] == [again.ref]


DECLARATION: dict[str, Any] = {"name": "mine", "submit": {"url": "https://example.com/make"}, "urls": "/url"}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Not a name"},
        {"surprise": 1},
        {"urls": "no pointer"},
        {"submit": {"url": "ftp://example.com"}},
        {"submit": {"url": "https://example.com/{credential}"}},
        {"submit": {"url": "https://example.com", "body": {"a": ["{nonsense}"]}}},
        {"ref": "/id"},
        {"ref": "/id", "status": "/s", "poll": {"url": "https://example.com/{ref}"}},
        {"statuses": {"ok": "made"}},
        {"ref": "/id", "status": "/s", "poll": {"url": "https://example.com/"}, "statuses": {"ok": "great"}},
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_at_the_start(changes: dict[str, Any]) -> None:
    declarations(orjson.dumps([DECLARATION]).decode())
    with pytest.raises(DeclarationError, match="generation_http_providers"):
        declarations(orjson.dumps([DECLARATION | changes]).decode())


def test_settings_that_name_a_provider_nobody_knows_are_refused(tmp_path: Any) -> None:
    file = tmp_path / "providers.json"
    file.write_bytes(orjson.dumps([DECLARATION]))
    settings = Settings(_env_file=None, generation_http_providers=str(file), generation_provider="mine")
    found = Catalogue(settings).find("mine")
    assert found is not None
    assert not found.has_credential
    for changes in ({"generation_provider": "nobody"}, {"generation_limits": {"nobody": 1}}):
        with pytest.raises(DeclarationError, match="nobody"):
            Catalogue(settings.model_copy(update=changes))
    for source in (str(tmp_path / "missing.json"), orjson.dumps([DECLARATION | {"name": "ark"}]).decode()):
        with pytest.raises(DeclarationError):
            Catalogue(settings.model_copy(update={"generation_http_providers": source}))


async def test_a_template_writes_zero_and_false_and_leaves_out_a_header_without_a_value(simulator: Simulator) -> None:
    submit = {
        "url": simulator.url + "/?strength={sample_strength}&pro={is_pro}&ratio={ratio}",
        "headers": {"x-model": "{model}", "x-strength": "{sample_strength}", "x-text": "pro={is_pro} width={width}"},
    }
    declaration = orjson.dumps([DECLARATION | {"submit": submit}]).decode()
    settings = Settings(_env_file=None, generation_http_providers=declaration, egress_allow="127.0.0.0/8")
    async with open_providers(settings) as opened:
        with pytest.raises(ProviderError):  # nobody answers there
            await opened["mine"].submit(order("mine", "image", "p", sample_strength=0.0), "c")
    (request,) = simulator.requests
    assert request.query == {"strength": "0.0", "pro": "false"}
    headers = {name: value for name, value in request.headers.items() if name.startswith("x-")}
    assert headers == {"x-strength": "0.0", "x-text": "pro=false width="}


def test_declarations_that_are_no_utf_8_are_refused(tmp_path: Any) -> None:
    file = tmp_path / "providers.json"
    file.write_bytes(orjson.dumps([DECLARATION]) + b"\xff")
    with pytest.raises(DeclarationError, match="is not UTF-8"):
        declarations(str(file))


def test_a_null_of_a_template_is_sent_and_what_has_no_value_is_not() -> None:
    template = {"a": None, "b": "{ratio}", "c": [None, "{ratio}", "{width}"], "d": {"e": None}, "f": "{width}"}
    assert _fill(template, {"width": 8, "ratio": None}) == {"a": None, "c": [None, 8], "d": {"e": None}, "f": 8}


@pytest.mark.parametrize(("found", "word"), [(True, "true"), (None, "null"), (2, "2"), ("done", "done")])
async def test_a_status_that_is_no_text_is_declared_as_json_writes_it(found: object, word: str) -> None:
    class Sender:
        async def send(self, *_arguments: Any, **_options: Any) -> Any:
            return SimpleNamespace(body={"status": found}, is_success=True, after=None)

    poll = {"url": "https://example.com/{ref}", "method": "GET"}
    more = {"ref": "/id", "status": "/status", "poll": poll, "statuses": {word: "working"}}
    (declaration,) = declarations(orjson.dumps([DECLARATION | more]).decode())
    sender: Any = Sender()
    state = await Declared(sender, declaration).poll("7", order("mine", "image", "p"), "c")
    assert state == Working(word, after=None)


class Sent:
    """Keeps the URLs of requests in place of sending them."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    async def send(self, _method: str, url: str, **_options: Any) -> Any:
        self.urls.append(url)
        return SimpleNamespace(body={"id": "7", "url": "https://example.com/f"}, is_success=True, after=None)


def declared(url: str) -> tuple[Declared, Sent]:
    (declaration,) = declarations(orjson.dumps([DECLARATION | {"submit": {"url": url}}]).decode())
    sent: Any = Sent()
    return Declared(sent, declaration), sent


@pytest.mark.parametrize(
    ("url", "model"),
    [
        *(
            ("https://example.com/v1/{model}/make", model)
            for model in (
                "..", ".", "", None, "../../admin", "o/..", "o/./m", "..\\m", "%2e%2e", "%2E", "o%2f..", "..;m",
            )
        ),
        ("https://example.com/v1/.{model}/make", "."),
        ("https://example.com/v1/%2e{model}", "."),
        ("https://example.com/{kind}/{model}", ".."),
        ("https://example.com/v1/{model}?a={prompt}", ".."),
        ("https://{model}/v1", ""),
    ],
)  # fmt: skip
async def test_a_value_that_would_lead_to_another_path_of_a_declared_provider_is_refused_before_anything_is_sent(
    url: str, model: str | None
) -> None:
    """It would lead the installation's credential to another endpoint."""
    provider, sent = declared(url)
    with pytest.raises(Rejected) as refused:
        await provider.submit(order("mine", "image", "p", model=model), "c")
    assert (refused.value.code, sent.urls) == ("path_malformed", [])


@pytest.mark.parametrize(
    ("url", "model", "filled"),
    [
        ("https://example.com/v1/{model}/make", "o/m", "https://example.com/v1/o%2Fm/make"),
        ("https://example.com/v1/{model}", "v1.5", "https://example.com/v1/v1.5"),
        ("https://example.com/v1/{model}", "...", "https://example.com/v1/..."),
        ("https://example.com/v1/m{model}", None, "https://example.com/v1/m"),
        ("https://example.com/?m={model}/x", "..", "https://example.com/?m=../x"),
        ("https://example.com/../v1//{kind}/", "..", "https://example.com/../v1//image/"),  # the declaration's own
    ],
)
async def test_a_value_that_leads_to_no_other_path_is_sent(url: str, model: str | None, filled: str) -> None:
    provider, sent = declared(url)
    await provider.submit(order("mine", "image", "p", model=model), "c")
    assert sent.urls == [filled]


async def test_the_id_of_an_order_leads_to_no_other_path_of_a_declared_provider() -> None:
    more = {
        "ref": "/id", "status": "/status", "statuses": {"made": "made"},
        "poll": {"url": "https://example.com/{ref}"}, "cancel": {"url": "https://example.com/jobs/{ref}"},
    }  # fmt: skip
    (declaration,) = declarations(orjson.dumps([DECLARATION | more]).decode())
    sent: Any = Sent()
    provider = Declared(sent, declaration)
    for asking in (provider.poll, provider.cancel):
        with pytest.raises(Rejected, match="path"):
            await asking("..", order("mine", "image", "p"), "c")
    assert sent.urls == []


async def test_a_request_that_the_worker_gives_up_is_no_bug_in_the_metrics() -> None:
    class Silent(Ark):
        async def submit(self, order: Order, credential: str) -> Accepted | Finished:
            await asyncio.sleep(60)
            raise AssertionError

    def count(outcome: str) -> float:
        labels = {"provider": "ark", "operation": "submit", "outcome": outcome}
        return REGISTRY.get_sample_value("leasehold_generation_provider_requests_total", labels) or 0.0

    before = count("cancelled"), count("error")
    provider = measured(Silent(cast("RequestSender", None), ""))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(provider.submit(order("ark", "image", "p"), "c"), 0.01)
    assert (count("cancelled"), count("error")) == (before[0] + 1, before[1])
