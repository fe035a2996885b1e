"""GitHub's workflow does what `.ci/run` does, and tries the broker's tests with the releases that the docs name."""

from __future__ import annotations

import re
import tomllib

import yaml

from tests.packaging.built import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
JOBS = WORKFLOW["jobs"]


def test_a_job_is_the_command_of_every_other_machine_with_the_oldest_python() -> None:
    (python,) = [step["with"]["python-version"] for step in JOBS["run"]["steps"] if "python-version" in str(step)]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert [step["run"] for step in JOBS["run"]["steps"] if "run" in step] == [".ci/run"]
    assert python == oldest


def test_the_broker_is_tried_with_the_releases_of_the_documentation() -> None:
    releases = JOBS["broker"]["strategy"]["matrix"]["rabbitmq"]
    page = (ROOT / "docs/operations/failover.md").read_text()
    (named,) = re.findall(r"CI runs the broker's tests with RabbitMQ (\S+) and (\S+)\.\s", page)
    assert list(named) == releases
    *_, last = (step["run"] for step in JOBS["broker"]["steps"] if "run" in step)
    assert last == "scripts/test broker"


def test_the_workflow_runs_no_image_that_may_change_and_may_write_nothing() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert f"FROM {JOBS['broker']['container']} AS base" in dockerfile
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert any(step.get("with", {}).get("persist-credentials") is False for step in job["steps"])
