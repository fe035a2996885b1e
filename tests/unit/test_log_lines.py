from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from leasehold.telemetry.logs import as_json


@pytest.mark.parametrize("word", ["plain", 7, 2**70, "half a pair \ud800", {1: "one"}, "ключ"])
def test_a_line_is_written_whatever_a_library_puts_into_it(word: object) -> None:
    said = json.loads(as_json({"event": "said", "word": word}, default=repr))
    assert said["word"] == (word if not isinstance(word, dict) else {"1": "one"})


def test_what_is_not_jsons_is_written_as_the_renderer_says() -> None:
    instant = datetime(2026, 11, 21, tzinfo=UTC)
    assert json.loads(as_json({"word": {instant}}, default=repr)) == {"word": repr({instant})}
