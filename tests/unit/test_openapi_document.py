from __future__ import annotations

from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from leasehold.api.http import openapi


async def test_a_document_that_could_not_be_built_once_is_built_for_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[dict[str, Any] | None] = [None, {"openapi": "3.1.0"}]

    def document(_app: FastAPI) -> dict[str, Any]:
        answer = answers.pop(0)
        if answer is None:
            raise MemoryError
        return answer

    monkeypatch.setattr(openapi, "document", document)
    contract = openapi.Contract(FastAPI())
    with pytest.raises(MemoryError):
        await contract.content()
    assert orjson.loads(await contract.content()) == {"openapi": "3.1.0"}
    assert orjson.loads(await contract.content()) == {"openapi": "3.1.0"}  # and only once
