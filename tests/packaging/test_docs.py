"""The docs say what the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from leasehold.file_secrets import holds_secrets
from leasehold.pipelines.media import refusals
from leasehold.pipelines.media.variants import VARIANTS
from leasehold.settings import Settings

ROOT = Path(__file__).parents[2]
MEDIA = (ROOT / "docs/guides/media.md").read_text()
ERRORS = (ROOT / "docs/reference/errors.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_THE_COMMAND_LINE = {"LEASEHOLD_URL", "LEASEHOLD_API_KEY", "LEASEHOLD_TEST_DATABASE_URL", "LEASEHOLD_RABBIT"}
KNOWN = {f"LEASEHOLD_{name.upper()}" for name in Settings.model_fields} | OF_THE_COMMAND_LINE
KNOWN |= {f"LEASEHOLD_{n.upper()}_FILE" for n, at in Settings.model_fields.items() if holds_secrets(at.annotation)}

#: What a stranger reads: neither the changelog, which tells of what was, nor what a script has made.
FOLDERS = ("api", "bench", "chaos", "deploy", "docs", "examples", "grafana", "leasehold", "scripts", "tests", "worker")
WRITTEN = {"", ".md", ".py", ".sh", ".sql", ".toml", ".yaml", ".yml"}


def texts() -> Iterator[Path]:
    yield from (
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "compose.yaml", "pyproject.toml")
    )
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in WRITTEN and path.is_file())


def test_every_secret_has_a_line_that_says_what_uses_its_new_value() -> None:
    page = (ROOT / "docs/operations/index.md").read_text().partition("## Secrets in files")[2].partition("\n## ")[0]
    named = {
        name for line in re.findall(r"^\| (`[A-Z].*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\S+)`", line)
    }
    secret = {name.upper() for name, of in Settings.model_fields.items() if holds_secrets(of.annotation)}
    assert {name for name in secret if not any(fnmatch(name, pattern) for pattern in named)} == set()
    assert {pattern for pattern in named if not any(fnmatch(name, pattern) for name in secret)} == set()


def test_every_reason_to_refuse_a_picture_is_documented() -> None:
    codes = set(re.findall(r'Permanent\(\s*"([a-z_]+)"', Path(refusals.__file__).read_text()))
    assert codes == set(re.findall(r"^\| `([a-z_]+)` \| [a-z]", MEDIA, re.MULTILINE)) & codes
    assert len(codes) > 5


def test_every_code_of_the_processing_of_a_picture_is_a_code_of_the_reference() -> None:
    (named,) = re.findall(r"^Other codes are of the processing: (.*?)\.", MEDIA, re.MULTILINE | re.DOTALL)
    codes = re.findall("`([a-z_]+)`", named)
    assert len(codes) > 5
    assert [code for code in codes if f"| `{code}` | " not in ERRORS.partition("## Codes of a job")[2]] == []


def test_every_variant_is_documented() -> None:
    assert all(f"`{name}`" in MEDIA for name in VARIANTS)


def test_every_code_of_the_api_is_documented() -> None:
    raised = {
        code
        for path in (ROOT / "api").rglob("*.py")
        for code in re.findall(
            r'(?:Conflict|Invalid|NotFound|Forbidden|Unauthenticated)\(\s*"([a-z_]+)"', path.read_text()
        )
    }
    assert {code for code in raised if f"`{code}`" not in ERRORS} == set()


def test_a_code_beside_a_status_is_answered_with_it() -> None:
    """As in "`too_large`, `image_missing` (422)" and in "409 `lease_lost`"."""
    statuses: dict[str, set[str]] = {}
    for code, status in re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \|", ERRORS, re.MULTILINE):
        statuses.setdefault(code, set()).add(status)
    codes = r"(`[a-z_]+`(?:(?:,\s+|\s+and\s+|\s+or\s+)`[a-z_]+`)*)"
    named: list[tuple[str, str, str]] = []
    for page in PAGES:
        text = page.read_text()
        found = [*re.findall(codes + r"\s+\(([45]\d\d)\b", text)]
        found += [(listed, status) for status, listed in re.findall(r"\b([45]\d\d) " + codes, text)]
        named += [(page.name, code, status) for listed, status in found for code in re.findall("`(.*?)`", listed)]
    assert [one for one in named if one[2] not in statuses.get(one[1], {one[2]})] == []
    assert len(named) > 50


def test_every_variable_that_is_named_exists() -> None:
    for page in PAGES:
        named = set(re.findall(r"LEASEHOLD_[A-Z0-9_]+\b(?!\*)", page.read_text()))
        unknown = {name for name in named if name not in KNOWN and not name.endswith("_")}
        assert unknown == set(), page


def test_every_path_that_is_linked_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def test_every_page_that_a_file_of_the_repository_names_exists() -> None:
    """Alerts, docstrings, scripts and tests name pages, and nothing else notices when a page moves."""
    named = [
        (str(file.relative_to(ROOT)), page)
        for file in texts()
        for page in re.findall(r"\bdocs/[A-Za-z0-9_/-]+\.(?:md|svg)\b", file.read_text())
    ]
    assert [(file, page) for file, page in named if not (ROOT / page).exists()] == []
    assert len(named) > 50


def test_every_test_file_that_a_page_names_exists() -> None:
    for page in PAGES:
        for named in re.findall(r"`scripts/test ([^`]+)`", page.read_text()):
            for word in named.split():
                if "/" in word:
                    assert (ROOT / word).exists(), (page, word)
