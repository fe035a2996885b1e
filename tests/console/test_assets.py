"""The console's files: libraries are those of their packages; no page needs another origin or runs inline code."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx2
import pytest

from leasehold.api.console import assets
from tests.api.conftest import Running
from tests.console.conftest import MakePerson
from tests.jobs.conftest import Maker

#: SHA-256 of the files in the npm packages htmx.org 2.0.11 and idiomorph 0.8.0.
VENDORED = {
    "htmx-2.0.11.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "htmx-LICENSE.txt": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
    "idiomorph-ext-0.8.0.min.js": "5811b9a7eda14878b7dab4378bf60432e1bb6f11fcfb970cc26540642650181e",
    "idiomorph-LICENSE.txt": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
}
TEMPLATES = Path(assets.__file__).with_name("templates")
_ELSEWHERE = re.compile(r"""(?:src|href|action)=["'](?:https?:)?//|@import""")


def test_the_libraries_are_those_of_their_packages_and_bring_their_licences() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (assets.FOLDER / "vendor").iterdir()}
    assert found == VENDORED


@pytest.mark.parametrize(
    "path", sorted([*TEMPLATES.glob("*.html"), *assets.FOLDER.glob("*.*")]), ids=lambda path: path.name
)
def test_nothing_is_inline_and_nothing_is_elsewhere(path: Path) -> None:
    text = path.read_text()
    assert not _ELSEWHERE.search(text)
    if path.suffix == ".css":
        assert "url(" not in text
    if path.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:|hx-on|\|\s*safe", text)


async def test_files_are_kept_for_good_under_an_address_with_their_hash(running: Running) -> None:
    async with httpx2.AsyncClient(base_url=running.url, timeout=40) as http:
        for name in assets.FILES:
            answer = await http.get(f"/console/assets/{assets.version(name)}/{name}")
            assert answer.content == assets.content(name)
            assert "immutable" in answer.headers["cache-control"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        for wrong in ("console.py", "..%2Frouter.py", "vendor%2Fhtmx-LICENSE.txt"):
            assert (await http.get(f"/console/assets/x/{wrong}")).status_code in (401, 404)


async def test_a_browser_that_unpacks_gzip_gets_the_files_packed(running: Running) -> None:
    async with httpx2.AsyncClient(base_url=running.url, timeout=40) as http:
        for name in assets.FILES:
            path = f"/console/assets/{assets.version(name)}/{name}"
            for packed in ("gzip", "br, GZIP;q=0.5", "deflate, gzip;q=1.0, *;q=0"):
                answer = await http.get(path, headers={"Accept-Encoding": packed})
                assert answer.headers["content-encoding"] == "gzip"
                assert int(answer.headers["content-length"]) == len(assets.compressed(name))
                assert answer.content == assets.content(name)
            for plain in ("", "identity", "br", "gzip;q=0", "gzip; q=0.000, br"):
                answer = await http.get(path, headers={"Accept-Encoding": plain})
                assert "content-encoding" not in answer.headers, plain
                assert int(answer.headers["content-length"]) == len(assets.content(name))
            assert answer.headers["vary"] == "Accept-Encoding"


async def test_pages_are_not_compressed_beside_the_token_of_their_forms(person: MakePerson) -> None:
    somebody = await person()
    answer = await somebody.http.get("/console/jobs?q=x", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in answer.headers


async def test_a_page_with_all_its_files_weighs_under_150_kb_even_unpacked(person: MakePerson, maker: Maker) -> None:
    somebody = await person()
    await maker.make("run", payload={"text": "x" * 50_000})
    for number in range(49):
        await maker.make(
            "run", scope="user", scope_id=str(number), tags={"customer": "a customer with a name", "n": str(number)}
        )
    job_id = await maker.make("run", scope="user", scope_id="long", payload={"text": "x" * 200_000})
    unpacked = sum(len(assets.content(name)) for name in assets.FILES)
    packed = sum(len(assets.compressed(name)) for name in assets.FILES)
    for path in ("/jobs", f"/jobs/{job_id}", "/"):
        page = len((await somebody.see(path)).encode())
        assert page + unpacked < 149_000, f"{path}: {page} and {unpacked} bytes"
        assert page + packed < 90_000, f"{path}: {page} and {packed} bytes as sent"


async def test_pages_carry_a_strict_policy(person: MakePerson) -> None:
    somebody = await person()
    for path in ("/", "/jobs", "/nothing"):
        answer = await somebody.http.get(f"/console{path}")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
