"""Checks that all files and the tag name one version, then builds the release and tries it. Run by scripts/release.

The same commit gives the same bytes: all times are the commit's, and the build tools are pinned by pyproject.toml and
scripts/uv.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Programs of every installation, with or without extras. Each is run in an empty folder.
TRIALS = (
    ["leasehold", "--help"],
    ["leasehold", "settings"],
    ["python", "-I", "-c", "import leasehold; [getattr(leasehold, name) for name in leasehold.__all__]"],
)
#: Options of `uv export` for the SBOM and for the trial of the wheel.
LOCKED = ["--quiet", "--frozen", "--no-dev", "--all-extras", "--project", str(ROOT)]


class NotReady(Exception):
    """The release cannot be built. The message says what to do."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument("--uv", required=True, help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="the folder of the results; older results in it are deleted"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="build the files as they are: no tag and no commit are needed"
    )
    options = parser.parse_args()
    try:
        version = agreed_version(rehearse=options.rehearse)
        release(options.uv, version, options.out.resolve())
    except NotReady as error:
        sys.exit(f"scripts/release: {error}")


def agreed_version(*, rehearse: bool) -> str:
    """The version that pyproject.toml, uv.lock, CHANGELOG.md and the tag name. Raises NotReady if they differ."""
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (locked,) = (
        package["version"]
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
        if package["name"] == "leasehold"
    )
    if locked != version:
        raise NotReady(f"pyproject.toml has version {version}, uv.lock has {locked}: run `uv lock`")
    if rehearse:
        return version
    check_changelog((ROOT / "CHANGELOG.md").read_text(), version)
    if changed := git("status", "--porcelain"):
        raise NotReady(f"commit these first:\n{changed}")
    tags = [tag for tag in git("tag", "--points-at", "HEAD").split() if re.fullmatch(r"v\d.*", tag)]
    if tags != [f"v{version}"]:
        raise NotReady(f"HEAD must have the tag v{version} and no other version; it has {tags or 'none'}")
    return version


def check_changelog(text: str, version: str) -> None:
    """Check that `## Unreleased` is empty, and that the next heading is `## VERSION - DATE`. Raises NotReady if not."""
    unreleased = r"^## Unreleased\n(?P<unreleased>.*?)"
    newest = r"^## (?P<version>\S+) - \d{4}-\d\d-\d\d\n(?P<lines>.*?)(?=^## |\Z)"
    match = re.search(unreleased + newest, text, re.MULTILINE | re.DOTALL)
    if match is None or match["version"] != version:
        raise NotReady(f"CHANGELOG.md needs `## {version} - YYYY-MM-DD` below an empty `## Unreleased`")
    if match["unreleased"].strip():
        raise NotReady(
            f"CHANGELOG.md has lines under `## Unreleased`: move them under `## {version}`, or release a commit without"
            " their changes"
        )
    if not match["lines"].strip():
        raise NotReady(f"CHANGELOG.md has no lines under `## {version}`")


def release(uv: str, version: str, out: Path) -> None:
    epoch = git("log", "-1", "--format=%ct")
    out.mkdir(parents=True, exist_ok=True)
    for path in [*out.glob("leasehold-*"), *out.glob("SHA256SUMS")]:
        path.unlink()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    environment.pop("VIRTUAL_ENV", None)
    run([uv, "build", "--quiet", "--no-create-gitignore", "--out-dir", str(out), str(ROOT)], env=environment)
    wheel, sdist = out / f"leasehold-{version}-py3-none-any.whl", out / f"leasehold-{version}.tar.gz"
    try_wheel(uv, wheel, version)
    sbom = out / f"leasehold-{version}.cdx.json"
    sbom.write_text(json.dumps(bill_of_materials(uv, [wheel, sdist], int(epoch)), indent=2) + "\n")
    built = sorted([wheel, sdist, sbom])
    (out / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in built))
    print((out / "SHA256SUMS").read_text(), end="")


def try_wheel(uv: str, wheel: Path, version: str) -> None:
    """Install the wheel and its requirements, at the versions of uv.lock, and start its programs. Raises NotReady if
    that fails.
    """
    with tempfile.TemporaryDirectory(prefix="leasehold-release-") as folder:
        home, empty = Path(folder, "environment"), Path(folder, "empty")
        empty.mkdir()
        run([uv, "venv", "--quiet", "--python", sys.executable, str(home)])
        constraints = str(home / "constraints.txt")
        run([uv, "export", *LOCKED, "--no-hashes", "--no-emit-project", "--output-file", constraints])
        install = [uv, "pip", "install", "--quiet", "--python", str(home / "bin/python")]
        run([*install, "--constraints", constraints, str(wheel)])
        for program, *arguments in TRIALS:
            run([str(home / "bin" / program), *arguments], cwd=empty)
        print_version = "from importlib.metadata import version; print(version('leasehold'))"
        if (installed := run([str(home / "bin/python"), "-I", "-c", print_version], cwd=empty)) != version:
            raise NotReady(f"the wheel installs version {installed}, not {version}")


def bill_of_materials(uv: str, files: list[Path], epoch: int) -> dict[str, Any]:
    """The SBOM (CycloneDX 1.5): the packages of uv.lock with all extras, and the sums of `files`."""
    form = ["--format", "cyclonedx1.5", "--preview-features", "sbom-export"]
    bill: dict[str, Any] = json.loads(run([uv, "export", *LOCKED, *form]))
    component = bill["metadata"]["component"]
    component["purl"] = f"pkg:pypi/{component['name']}@{component['version']}"
    component["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    component["externalReferences"] = [
        {"type": "distribution", "url": path.name, "hashes": [{"alg": "SHA-256", "content": sha256(path)}]}
        for path in files
    ]
    bill["metadata"]["timestamp"] = datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
    bill["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps({**bill, "serialNumber": ""}, sort_keys=True)).urn
    return bill


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    return run(["git", "-C", str(ROOT), *arguments])


def run(command: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """The output of the command. Raises NotReady with the output if the command fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd, env=env)
    if done.returncode != 0:
        raise NotReady(f"{' '.join(command[:3])} ... failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
