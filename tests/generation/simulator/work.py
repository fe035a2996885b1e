"""What the simulator makes: generations that were bought, each by the script in its prompt, and their files."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count
from typing import Any

import httpx2
from PIL import Image

from tests.generation.simulator.http import HangUp, Reply, Request

_WORD = re.compile(r"#([a-z]+)(?:=([\w.-]+))?")
_MIB = 1024 * 1024
_PATIENCE_SECONDS = 60.0


class Script:
    """The `#words` of a prompt.

    busy=N, poor=N, down=N: the first N submissions answer 429, 402 or 500 without having bought anything. lost,
    garbled: it is bought, and the answer does not arrive, or is not JSON. then=STATUS: each submission but the first
    answers this. slow=S: seconds before a submission is answered. after=N: it is answered once so many have been
    bought. work=N: polls until it is made (1); never: it is not. ill=N, locked=N: the first N polls answer 500 or 401.
    withheld=STATUS: the first request to fal for the files that are made answers this. odd: polls answer a status that
    nobody has heard of. fail=CODE: it fails. broken=N: the first N that are bought fail. wait=S: a cancel answers 429,
    to be sent again after S seconds. files=N (1), file=html|huge|gone|away|moved|inside|empty: what their links lead to
    (the last one's, with onlylast). news=S: made after S seconds, however often it is polled, and whoever gave an
    address to call is called then.
    """

    def __init__(self, prompt: str) -> None:
        self._words: dict[str, str] = dict(_WORD.findall(prompt))

    def has(self, word: str) -> bool:
        return word in self._words

    def text(self, word: str) -> str:
        return self._words.get(word, "")

    def number(self, word: str, otherwise: int = 0) -> int:
        return int(self._words.get(word) or otherwise)


@dataclass
class Bought:
    id: str
    kind: str
    prompt: str
    token: str | None
    script: Script
    number: int = 1  # the first that was bought of its prompt is number 1
    at: float = field(default_factory=time.time)
    polled_at: float = 0.0
    polls: int = 0
    cancelled: bool = False
    ready: bool = False
    is_withheld: bool = True

    @property
    def state(self) -> str:
        """working, made, failed or cancelled."""
        if self.cancelled:
            return "cancelled"
        if self.script.has("news"):
            return "made" if self.ready else "working"
        if self.script.has("never") or self.polls <= self.script.number("work", 1):
            return "working"
        return "failed" if self.script.has("fail") or self.number <= self.script.number("broken") else "made"


@dataclass
class Studio:
    """All that was bought. `attempts`: submissions by prompt, answered or not."""

    url: str = ""
    endless: bool = False  # what it never sold is never made, instead of unknown
    bought: dict[str, Bought] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    polled: int = 0
    most_under_way: int = 0
    _under_way: set[str] = field(default_factory=set)  # kept: 100,000 of them cannot be counted at each purchase
    _ids: count[int] = field(default_factory=count)
    _by_token: dict[str, Bought] = field(default_factory=dict)
    told: list[tuple[str, int]] = field(default_factory=list)  # calls to who ordered, with their answers
    _telling: set[asyncio.Task[None]] = field(default_factory=set)

    async def buy(self, kind: str, prompt: str, token: str | None = None) -> Bought | Reply:
        """As the prompt says: a purchase, or the answer that it is none. Raises HangUp when the answer is lost."""
        script = Script(prompt)
        self.attempts[prompt] += 1
        if (refusal := self._refusal(script, self.attempts[prompt])) is not None:
            await asyncio.sleep(float(script.text("slow") or 0))
            return refusal
        made = self._by_token.get(token or "")
        if made is None:
            number = 1 + sum(one.prompt == prompt for one in self.bought.values()) if script.has("broken") else 1
            made = Bought(f"g{next(self._ids)}", kind, prompt, token, script, number)
            self.bought[made.id] = made
            self._under_way.add(made.id)
            self.most_under_way = max(self.most_under_way, len(self._under_way))
            if token:
                self._by_token[token] = made
            if script.has("lost"):
                raise HangUp
            if script.has("garbled"):
                return Reply(body=b"<html>oops</html>")
        await asyncio.sleep(float(script.text("slow") or 0))
        if script.has("after"):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while len(self.bought) < script.number("after"):
                    await asyncio.sleep(0.01)
        return made

    def _refusal(self, script: Script, attempt: int) -> Reply | None:
        """The answer to a submission that buys nothing."""
        if attempt <= script.number("busy"):
            return Reply(429, {"error": "busy"}, headers={"retry-after": "0"})
        if attempt <= script.number("poor"):
            return Reply(402, {"detail": "you have no credit"})
        if attempt <= script.number("down"):
            return Reply(500, {"error": "down"})
        if script.has("then") and attempt > 1:
            return Reply(script.number("then"), {"error": "not now"}, headers={"retry-after": "3600"})
        return None

    def find(self, ref: str) -> Bought | None:
        if self.endless and ref not in self.bought:
            return Bought(ref, "image", "#never", None, Script("#never"))
        return self.bought.get(ref)

    def poll(self, bought: Bought) -> Reply | None:
        """One look at it; a reply, when it goes wrong."""
        bought.polls += 1
        bought.polled_at = time.time()
        self.polled += 1
        self._note(bought)
        if bought.polls <= bought.script.number("ill"):
            return Reply(500, body=b"Internal Server Error")
        if bought.polls <= bought.script.number("locked"):
            return Reply(401, {"detail": "this key is locked"})
        return None

    def will_tell(self, bought: Bought, url: str | None, say: Callable[[], Any]) -> None:
        """Finish it by the clock, and say so. Ark documents 5 seconds for an answer, and three tries. Here are more,
        because a busy machine would use those up.
        """
        if bought.script.has("news"):
            task = asyncio.create_task(self._tell(bought, url, say))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, bought: Bought, url: str | None, say: Callable[[], Any]) -> None:
        await asyncio.sleep(float(bought.script.text("news") or 0))
        bought.ready = True
        self._note(bought)
        if url is None:
            return
        async with httpx2.AsyncClient(timeout=_PATIENCE_SECONDS) as http:
            for _ in range(20):
                answer = await http.post(url, json=say(), headers={"webhook-id": f"msg_{bought.id}"})
                self.told.append((url, answer.status_code))
                if answer.is_success:
                    break

    def cancel(self, bought: Bought) -> None:
        bought.cancelled = True
        self._note(bought)

    def _note(self, bought: Bought) -> None:
        if bought.state != "working":
            self._under_way.discard(bought.id)

    def links(self, bought: Bought) -> list[str]:
        if bought.script.has("nofiles"):
            return []
        return [f"{self.url}/files/{bought.id}/{n}?signature=s3cret" for n in range(bought.script.number("files", 1))]

    def file(self, request: Request) -> Reply:
        _, _, ref, number = request.path.split("/")
        bought = self.bought[ref]
        wrong = bought.script.text("file")
        if bought.script.has("onlylast") and int(number) + 1 < bought.script.number("files", 1):
            wrong = ""
        if wrong == "moved" and "moved" not in request.query:
            return Reply(302, headers={"location": f"{request.path}?moved=1"})
        right = Reply(body=picture(int(number)) if bought.kind == "image" else video())
        return _WRONG.get(wrong, right)


_WRONG = {
    "html": Reply(body=b"<!DOCTYPE html><p>Sign in to see this picture</p>"),
    "huge": Reply(body=b"\xff\xd8\xff" + b"x" * (_MIB - 3), repeat=4),
    "gone": Reply(403, {"message": "expired"}),
    "away": Reply(503),
    "inside": Reply(302, headers={"location": "http://169.254.169.254/latest/meta-data"}),
    "empty": Reply(body=b""),
}


def picture(number: int) -> bytes:
    made = BytesIO()
    Image.new("RGB", (8, 8), (number * 20 % 256, 90, 200)).save(made, "PNG")
    return made.getvalue()


def video() -> bytes:
    """The first box of an MP4, and some bytes."""
    return b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + b"\x00" * 2000
