"""The demo writes each result into a file of its own, and over no picture."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from leasehold.cli import demo
from leasehold.cli.demo import DemoFailed, run


@pytest.mark.parametrize(
    ("pictures", "out", "sentence"),
    [(["a/x.jpg", "b/x.png"], "out", "two pictures would be saved"), (["x.webp"], ".", "would replace")],
)
def test_a_result_that_would_replace_another_file_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: list[str], out: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DemoFailed, match=sentence):
        asyncio.run(run([Path(picture) for picture in pictures], out=Path(out)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("answer", "sentence"), [(b"HTTP/1.1 403 No", "answered 403"), (b"", "does not answer")])
async def test_a_store_that_refuses_or_is_silent_ends_the_demo_with_a_sentence_without_the_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, sentence: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(picture.stat().st_size)
        if answer:
            writer.write(answer + b"\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    picture = tmp_path / "x.jpg"
    picture.write_bytes(demo.SHIPPED.read_bytes())
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        async def ticket(_request: Awaitable[object]) -> dict[str, str]:
            return {"upload_url": f"http://127.0.0.1:{port}/bucket/key?X-Amz-Signature=secret", "media_id": "1"}

        monkeypatch.setattr(demo, "_json_of", ticket)
        client: Any = SimpleNamespace(post=lambda *_arguments, **_options: None)
        with pytest.raises(DemoFailed, match=sentence) as raised:
            await demo._send_all(client, [demo.Sent(picture, {})], tmp_path, lambda: None)
    assert "secret" not in str(raised.value)


def test_the_report_shows_names_as_they_are(tmp_path: Path) -> None:
    """Rich takes `[beach]` for a style, and `[/]` for its end."""
    picture = tmp_path / "sea [beach].jpg"
    picture.write_bytes(b"12345")
    folder = tmp_path / "of [summer"
    folder.mkdir()
    saved = folder / "] sea [beach].webp"
    saved.write_bytes(b"123")
    error = {"code": "broken_picture", "message": "the marker [b] is wrong\x1b[2J"}
    view: dict[str, Any] = {"status": "READY", "steps": [], "final_url": "http://store/x", "error": error}
    printed = StringIO()
    console = Console(file=printed, width=1000)
    sent = demo.Sent(picture, view, saved)
    demo._report(console, sent)
    console.print(demo._table([sent]))
    text = printed.getvalue()
    assert text.count("sea [beach].jpg") == 2
    assert f"saved      {saved} (3 bytes; the original has 5)" in text
    assert "broken_picture: the marker [b] is wrong\\x1b[2J" in text
