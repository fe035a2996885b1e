"""How the console's pages write values for people."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold.api.console import rendering, session
from leasehold.api.console.rendering import lasting, pretty, span

TEMPLATES = Path(rendering.__file__).with_name("templates")
#: A JSON value on a page of its own.
_SHOWN = re.compile(r"<pre[^>]*>\{\{ (\S+) \| json(.*?) \}\}</pre>")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (119, "1 min"), (3599, "59 min"),
        (3600, "1 h"), (3659, "1 h"), (3660, "1 h 1 min"), (86_399, "23 h 59 min"),
        (86_400, "1 d"), (89_999, "1 d"), (90_000, "1 d 1 h"), (40 * 86_400 + 7200, "40 d 2 h"),
    ],
)  # fmt: skip
def test_a_length_of_time_has_its_two_largest_units_from_an_hour_on(seconds: float | None, words: str) -> None:
    assert span(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, ""), (0.0125, "12 ms"), (1, "1.0 s"), (59.94, "59.9 s"), (60, "1 min")]
)
def test_a_short_length_of_time_has_milliseconds_or_tenths_of_seconds(seconds: float | None, words: str) -> None:
    assert lasting(seconds) == words


def test_a_large_value_is_cut_and_says_where_it_is_whole() -> None:
    large = {"text": "x" * 20_000}
    assert pretty({"a": 1}, "/v1/jobs/7") == '{\n  "a": 1\n}'
    whole = len('{\n  "text": ""\n}') + 20_000
    assert pretty(large, "/v1/jobs/7").endswith(f"x\n... {whole - 12_000:,} more characters: GET /v1/jobs/7 has all")
    assert pretty(large).endswith(f"x\n... {whole - 12_000:,} more characters")


def test_each_page_names_its_own_object_as_the_place_of_the_whole_value() -> None:
    shown = {(page.name, *found) for page in TEMPLATES.glob("*.html") for found in _SHOWN.findall(page.read_text())}
    assert shown == {
        ("job.html", "job.parameters", "('/v1/jobs/' ~ job.id)"),
        ("job.html", "job.result", "('/v1/jobs/' ~ job.id)"),
        ("schedule.html", "schedule.payload_template", "('/v1/schedules/' ~ schedule.id)"),
        ("template.html", "template.payload_schema", "('/v1/templates/' ~ template.type ~ '/' ~ template.version)"),
    }


@pytest.mark.parametrize("is_rendered", [True, False])
def test_an_open_page_is_remembered_longer_than_an_abandoned_one(
    monkeypatch: pytest.MonkeyPatch, is_rendered: bool
) -> None:
    monkeypatch.setattr(rendering, "_MAX_LAST_PAGES", 2)
    viewer = SimpleNamespace(session=SimpleNamespace(nonce="n"))
    monkeypatch.setattr(session, "viewer_or_none", lambda _: viewer)
    app = SimpleNamespace(state=SimpleNamespace(console=SimpleNamespace(last_pages=OrderedDict())))

    def refresh_of(url: str) -> Any:
        return SimpleNamespace(app=app, url=url, headers={"hx-request": "true", rendering.MARK: url}, cookies={})

    def render(url: str) -> None:
        rendering._remember(refresh_of(url), ("n", url), (url, ("made of",)))

    def is_unchanged(url: str) -> bool:
        return rendering.unchanged(refresh_of(url), ("made of",)) is not None

    for url in ("/open", "/abandoned", "/open", "/next"):
        if is_rendered or ("n", url) not in app.state.console.last_pages:
            render(url)
        else:
            assert is_unchanged(url)
    assert (is_unchanged("/abandoned"), is_unchanged("/open"), is_unchanged("/next")) == (False, True, True)
    assert len(app.state.console.last_pages) == 2
