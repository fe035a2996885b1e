"""The site of docs/ builds strictly, its links lead somewhere, and it asks nothing of other hosts."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
#: What a browser fetches by itself. `a` is only followed by a person.
FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "link": "href",
    "object": "data",
}


class Page(HTMLParser):
    """The anchors, links and fetched parts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        self.anchors |= {said[name] for name in ("id", "name") if name in said}
        if tag == "a" and "href" in said:
            self.links.append(said["href"])
        if tag in FETCHED and said.get("rel") != "canonical":
            self.fetched.append(said.get(FETCHED[tag], ""))


async def build(docs: Path, to: Path) -> tuple[int, str]:
    """mkdocs with the repository's own configuration, of the pages in `docs`."""
    configuration = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {docs}")
    file = to.with_suffix(".yml")
    file.write_text(configuration)
    mkdocs = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(file), "--site-dir", str(to),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "true"},
    )  # fmt: skip
    said, _ = await mkdocs.communicate()
    return mkdocs.returncode or 0, said.decode()


@pytest.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    to = tmp_path_factory.mktemp("site") / "site"
    code, said = await build(ROOT / "docs", to)
    assert code == 0, said[-3000:]
    return {path: Page(path.read_text()) for path in to.rglob("*.html") if path.name != "404.html"}


def dead(site: dict[Path, Page]) -> Iterator[tuple[str, str]]:
    """Links within the site to a page or an anchor that is not there."""
    for path, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = site.get(target / "index.html" if target.is_dir() else target)
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                yield path.name, link


async def test_every_link_and_anchor_of_the_site_is_there(site: dict[Path, Page]) -> None:
    assert len(site) > 30
    assert list(dead(site)) == []


async def test_no_page_fetches_anything_from_elsewhere(site: dict[Path, Page]) -> None:
    fetched = {part for page in site.values() for part in page.fetched}
    assert [part for part in fetched if urlsplit(part).netloc or urlsplit(part).scheme not in ("", "data")] == []
    assert fetched != set()


async def test_no_stylesheet_fetches_anything_from_elsewhere(site: dict[Path, Page]) -> None:
    root = next(path for path in site if path.name == "index.html" and (path.parent / "assets").exists()).parent
    sheets = list((root / "assets").rglob("*.css"))
    assert sheets != []
    for sheet in sheets:
        assert re.findall(r"(?:url\(|@import\s*)['\"]?(?:https?:)?//[^)'\"]+", sheet.read_text()) == []


async def test_every_page_of_the_repository_is_reached_from_the_menu(site: dict[Path, Page]) -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    root = min(site, key=lambda path: len(path.parts)).parent
    assert pages == {str(path.relative_to(root)) for path in site}


async def test_a_dead_link_and_a_dead_anchor_would_be_noticed(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    for path in (ROOT / "docs").rglob("*.md"):
        copy = docs / path.relative_to(ROOT / "docs")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    for path in (ROOT / "docs").rglob("*.svg"):
        (docs / path.relative_to(ROOT / "docs")).write_bytes(path.read_bytes())
    (docs / "index.md").write_text("# Here\n\n[a page](nowhere.md) and [a heading](explanation/design.md#nowhere)\n")
    code, said = await build(docs, tmp_path / "site")
    assert code != 0
    assert "nowhere.md" in said
    assert "#nowhere" in said


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_of_a_page_at_the_top_is_there(name: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", (ROOT / name).read_text()):
        path = ROOT / target if target else ROOT / name
        assert path.exists(), target
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)}


def slug(heading: str) -> str:
    """An anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
