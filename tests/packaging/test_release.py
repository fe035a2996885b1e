"""`scripts/release` on a copy of the checkout, as if 9.9.9 came out of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.packaging.built import ROOT, run

VERSION = "9.9.9"
IDENTITY = {f"GIT_{who}_{what}": "release@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Checkout:
    """A repository of its own, one commit, with the tag."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for name in run(["git", "ls-files", "-co", "--exclude-standard", "-z"]).split("\0"):
            source, target = ROOT / name, home / name
            if name and (source.is_symlink() or source.exists()) and "/fixtures/" not in name:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target, follow_symlinks=False)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        self.replace("pyproject.toml", f'\nversion = "{version}"', f'\nversion = "{VERSION}"')
        self.replace(
            "uv.lock", f'name = "leasehold"\nversion = "{version}"', f'name = "leasehold"\nversion = "{VERSION}"'
        )
        self.replace("CHANGELOG.md", "## Unreleased\n", f"## Unreleased\n\n## {VERSION} - 2026-11-22\n\n- It is out.\n")
        self.git("init", "--quiet")
        self.commit()
        self.git("tag", f"v{VERSION}")

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.home / name).read_text()
        assert text.count(old) == 1, (name, old)
        (self.home / name).write_text(text.replace(old, new))

    def git(self, *arguments: str) -> None:
        quiet = ["-c", "commit.gpgsign=false", "-c", "gc.auto=0", "-c", "core.hooksPath=/dev/null"]
        run(["git", *quiet, *arguments], cwd=self.home, env=os.environ | IDENTITY)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")

    def release(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.home / "scripts/release", *arguments], check=False, capture_output=True, text=True, timeout=240
        )


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("release"))


@pytest.fixture
def checkout(tagged: Checkout, tmp_path: Path) -> Checkout:
    """A copy of it, to be spoilt."""
    shutil.copytree(tagged.home, tmp_path / "copy", symlinks=True)
    copy = object.__new__(Checkout)
    copy.home = tmp_path / "copy"
    return copy


def test_a_release_is_a_wheel_an_sdist_their_bill_of_materials_and_sums_and_the_same_each_time(
    tagged: Checkout, tmp_path: Path
) -> None:
    names = {f"leasehold-{VERSION}{end}" for end in ("-py3-none-any.whl", ".tar.gz", ".cdx.json")}
    results = []
    for out in (tmp_path / "once", tmp_path / "again"):
        done = tagged.release("--out", str(out))
        assert done.returncode == 0, done.stderr
        results.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert results[0] == results[1]
    assert results[0].keys() == names | {"SHA256SUMS"}
    sums = {name: hashlib.sha256(results[0][name]).hexdigest() for name in sorted(names)}
    assert results[0]["SHA256SUMS"].decode() == "".join(f"{sums[name]}  {name}\n" for name in sums)
    bill_names_all(json.loads(results[0][f"leasehold-{VERSION}.cdx.json"]), sums)


def bill_names_all(bill: dict[str, object], sums: dict[str, str]) -> None:
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    ours = bill["metadata"]["component"]  # type: ignore[index]
    assert (ours["name"], ours["version"], ours["purl"]) == ("leasehold", VERSION, f"pkg:pypi/leasehold@{VERSION}")
    files = {one["url"]: one["hashes"][0]["content"] for one in ours["externalReferences"]}
    assert files == {name: sums[name] for name in sums if not name.endswith(".json")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    declared = [one for group in (project["project"]["dependencies"], *extras) for one in group]
    components = {one["name"]: one for one in bill["components"]}  # type: ignore[attr-defined]
    assert {re.split(r"[\[<>=;]", one)[0].lower() for one in declared} <= components.keys()
    assert not {"mypy", "ruff"} & components.keys()  # pytest is of the extra `testing`
    for one in components.values():
        assert one["purl"].startswith(f"pkg:pypi/{one['name']}@{one['version']}")
        assert all(file["hashes"][0]["alg"] == "SHA-256" for file in one["externalReferences"])
        assert one["externalReferences"], one["name"]


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("CHANGELOG.md", f"## {VERSION} - ", "## 9.9.8 - ", f"CHANGELOG.md needs `## {VERSION} - "),
        ("CHANGELOG.md", f"## {VERSION} - 2026-11-22", f"## {VERSION}", f"CHANGELOG.md needs `## {VERSION} - "),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- More.\n", "lines under `## Unreleased`"),
        ("pyproject.toml", f'\nversion = "{VERSION}"', '\nversion = "9.9.8"', "run `uv lock`"),
    ],
)
def test_a_release_whose_versions_disagree_is_refused(
    checkout: Checkout, name: str, old: str, new: str, said: str
) -> None:
    checkout.replace(name, old, new)
    checkout.commit()
    checkout.git("tag", "--force", f"v{VERSION}")
    refused(checkout, said)


def test_a_release_of_a_commit_without_its_tag_is_refused(checkout: Checkout) -> None:
    checkout.git("tag", "--delete", f"v{VERSION}")
    refused(checkout, f"HEAD must have the tag v{VERSION}")


def test_a_release_of_a_commit_with_another_versions_tag_is_refused(checkout: Checkout) -> None:
    checkout.git("tag", "v9.9.8")
    refused(checkout, f"HEAD must have the tag v{VERSION}")


def test_a_release_of_what_is_not_committed_is_refused(checkout: Checkout) -> None:
    (checkout.home / "leasehold/more.py").touch()
    refused(checkout, "commit these first")


def refused(checkout: Checkout, said: str) -> None:
    done = checkout.release()
    assert done.returncode == 1
    assert said in done.stderr
    assert not (checkout.home / "dist").exists()
