"""What a child claims to have made is checked before anyone uploads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.errors import Permanent
from tests.worker.children.conftest import Pool


async def _refused(one: Pool, act: str, directory: Path, **args: Any) -> str:
    with pytest.raises(Permanent) as raised:
        await one.act(act, directory=directory, **args)
    assert raised.value.code == "bad_output"
    assert (await one.act("ok")).value is None
    return raised.value.message


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/passwd", ".", "UPPER", "a b", "nul\0"])
async def test_a_path_that_leaves_the_directory_is_refused(one: Pool, path: str) -> None:
    (one.work_dir / "outside").touch()
    directory = one.directory()
    (directory / "a").mkdir()
    await _refused(one, "claims", directory, name="out", path=path)


async def test_a_value_that_is_not_finite_is_refused(one: Pool) -> None:
    assert "at /losses/1:" in await _refused(one, "diverge", one.directory())


async def test_a_missing_file_is_refused(one: Pool) -> None:
    assert "No such file" in await _refused(one, "claims", one.directory(), name="out", path="missing")


async def test_a_symlink_is_refused(one: Pool) -> None:
    directory = one.directory()
    (directory / "linked").symlink_to("/etc/passwd")
    await _refused(one, "claims", directory, name="out", path="linked")


async def test_a_path_through_a_symlinked_folder_is_refused(one: Pool) -> None:
    directory = one.directory()
    (directory / "folder").symlink_to("/etc")
    await _refused(one, "claims", directory, name="out", path="folder/passwd")


async def test_a_hard_link_to_another_file_is_refused(one: Pool) -> None:
    directory = one.directory()
    (one.work_dir / "theirs").write_text("another attempt's")
    (directory / "linked").hardlink_to(one.work_dir / "theirs")
    await _refused(one, "claims", directory, name="out", path="linked")


@pytest.mark.parametrize("kind", ["folder", "fifo"])
async def test_what_is_no_regular_file_is_refused(one: Pool, kind: str) -> None:
    directory = one.directory()
    if kind == "folder":
        (directory / "made").mkdir()
    else:
        os.mkfifo(directory / "made")
    await _refused(one, "claims", directory, name="out", path="made")


@pytest.mark.parametrize("name", ["../x", "a//b", "/x", "x/", "Ü", "a/./b", "x" * 500])
async def test_an_output_name_that_is_no_safe_key_is_refused(one: Pool, name: str) -> None:
    directory = one.directory()
    (directory / "made").touch()
    await _refused(one, "claims", directory, name=name, path="made")


@pytest.mark.parametrize("content_type", ["", "text", "text/html\r\nx: y", "a/b/c", "text/plain; x"])
async def test_a_content_type_that_is_none_is_refused(one: Pool, content_type: str) -> None:
    directory = one.directory()
    (directory / "made").touch()
    await _refused(one, "claims", directory, name="out", path="made", content_type=content_type)


@pytest.mark.parametrize("what", ["large value", "deep value", "long number"])
async def test_a_value_too_large_or_without_json_form_is_refused(one: Pool, what: str) -> None:
    await _refused(one, "answers", one.directory(), what=what)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("large number", "the value cannot be stored: /numbers/1: an integer has at most 64 bits"),
        ("NUL", "the value cannot be stored: /text: a text with a NUL character cannot be stored"),
    ],
)
async def test_a_value_that_postgresql_cannot_store_is_refused_with_its_place(
    one: Pool, what: str, reason: str
) -> None:
    assert await _refused(one, "answers", one.directory(), what=what) == reason


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("huge value", "the answer cannot be sent: 2000"),
        ("no JSON", "the answer cannot be sent: it cannot be converted to JSON: "),
    ],
)
async def test_the_refusal_of_a_value_that_cannot_be_sent_says_why(one: Pool, what: str, reason: str) -> None:
    assert (await _refused(one, "answers", one.directory(), what=what)).startswith(reason)


async def test_a_nested_path_of_the_directory_is_taken(one: Pool) -> None:
    directory = one.directory()
    (directory / "a").mkdir()
    (directory / "a" / "b.bin").touch()
    args: dict[str, Any] = {"name": "a/b.bin", "path": "a/b.bin", "content_type": "application/octet-stream"}
    done = await one.act("claims", directory=directory, **args)
    assert done.files["a/b.bin"].path == directory / "a" / "b.bin"
