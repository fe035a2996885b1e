"""What an external worker keeps of its task's output while the API does not answer."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from leasehold.client.external import Task
from leasehold.client.external_output import MAX_CHARACTERS, MAX_ITEMS


class Api:
    """Gets the output of a task, unless it is away. `items`: by the last part of the path."""

    def __init__(self) -> None:
        self.is_away = False
        self.items: dict[str, list[Any]] = {"logs": [], "stream": []}

    async def request(self, path: str, *, first: int, epoch: int, **named: list[Any]) -> dict[str, Any]:
        if self.is_away:
            raise httpx2.ConnectError("away")
        kept, (items,) = self.items[path.rpartition("/")[2]], named.values()
        assert (first, epoch) == (len(kept) + 1, 7)
        kept += items
        return {"cut": False}

    @property
    def messages(self) -> list[str]:
        return [line["message"] for line in self.items["logs"]]


async def test_output_that_waits_for_the_api_has_a_bound_and_the_log_says_what_was_dropped() -> None:
    """It grew until the memory was full."""
    api = Api()
    async with httpx2.AsyncClient() as store:
        task = Task({"task_id": "1", "step": "made", "epoch": 7}, api.request, store)
        api.is_away = True
        text = "x" * 65_536
        for number in range(MAX_ITEMS + 5):
            assert task.emit(number) == (number < MAX_ITEMS)
            if number < MAX_CHARACTERS // len(text) + 5:
                task.log(text)
        task.log_failure("broken", "")
        with pytest.raises(httpx2.ConnectError):
            await task.flush()
        api.is_away = False
        await task.flush()
        assert api.items["stream"] == list(range(MAX_ITEMS))
        lines_kept = MAX_CHARACTERS // len(text) - 1  # a line is more than its message
        *messages, failure, loss = api.messages
        assert (messages, failure) == ([text] * lines_kept, "broken")
        assert loss.startswith("6 lines and 5 chunks of this attempt were dropped before this line: ")
        assert api.items["logs"][-1]["level"] == "warning"

        # What the API has takes no room, and a loss is told once.
        for number in range(MAX_ITEMS):
            assert task.emit(number)
        task.log(text)
        await task.flush()
        assert (len(api.items["stream"]), api.messages[-2:]) == (2 * MAX_ITEMS, [loss, text])


async def test_a_chunk_that_alone_is_too_long_is_dropped_and_others_are_kept() -> None:
    api = Api()
    async with httpx2.AsyncClient() as store:
        task = Task({"task_id": "1", "step": "made", "epoch": 7}, api.request, store)
        chunks = ("x" * MAX_CHARACTERS, "y" * (MAX_CHARACTERS // 2), "z")
        assert [task.emit(chunk) for chunk in chunks] == [False, True, True]
        await task.flush()
    assert [chunk[0] for chunk in api.items["stream"]] == ["y", "z"]
    assert api.messages[0].startswith("0 lines and 1 chunks")
