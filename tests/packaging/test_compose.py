"""What is shipped for Docker, as far as it can be checked without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from leasehold.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
KNOWN = {f"LEASEHOLD_{name.upper()}" for name in Settings.model_fields}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_or_built_here(name: str) -> None:
    image = SERVICES[name]["image"]
    assert "build" in SERVICES[name] or re.search(r":v?\d+\.\d+", image), image


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_says_when_it_is_healthy_or_runs_once(name: str) -> None:
    assert "healthcheck" in SERVICES[name] or SERVICES[name].get("restart") == "no"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_only_for_services_that_exist(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        assert needed in SERVICES
        if how["condition"] == "service_completed_successfully":
            assert SERVICES[needed]["restart"] == "no"
        else:
            assert how["condition"] == "service_healthy"
            assert "healthcheck" in SERVICES[needed]


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_of_ours_is_a_setting(name: str) -> None:
    variables = {v for v in SERVICES[name].get("environment", {}) if v.startswith("LEASEHOLD_")}
    assert variables <= KNOWN


@pytest.mark.parametrize("name", ["migrate", "api", "worker"])
def test_our_own_services_run_without_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["build"]["target"] in ("api", "worker")


def test_a_worker_has_more_time_to_stop_than_it_takes_to_drain() -> None:
    assert seconds(SERVICES["worker"]["stop_grace_period"]) > Settings(_env_file=None).drain_seconds


def test_every_port_is_bound_to_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_variables_that_compose_asks_for_are_in_the_example() -> None:
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", (ROOT / "compose.yaml").read_text()))
    offered = set(re.findall(r"^([A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert asked == offered


def test_everything_the_image_copies_exists_and_is_not_ignored() -> None:
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in kept, source


def test_every_package_of_the_wheel_is_in_the_image() -> None:
    wheel = re.search(r"packages = \[(.+?)\]", (ROOT / "pyproject.toml").read_text())
    assert wheel is not None
    for package in re.findall(r'"(\w+)"', wheel[1]):
        assert f"COPY {package} {package}\n" in DOCKERFILE


def test_the_image_runs_as_nobody_special() -> None:
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.MULTILINE)


def test_every_directory_that_is_mounted_exists_and_prometheus_finds_its_rules() -> None:
    mounts = [
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if volume[0] == "."
    ]
    assert mounts
    assert all((ROOT / mount).is_dir() for mount in mounts)
    configuration = yaml.safe_load((ROOT / "grafana/prometheus/prometheus.yaml").read_text())
    for pattern in configuration["rule_files"]:
        assert list((ROOT / "grafana/prometheus").glob(pattern))


def test_prometheus_scrapes_our_services_on_the_port_where_they_tell_and_nobody_publishes_it() -> None:
    configuration = yaml.safe_load((ROOT / "grafana/prometheus/prometheus.yaml").read_text())
    found = [found for job in configuration["scrape_configs"] for found in job.get("dns_sd_configs", [])]
    assert {name for one in found for name in one["names"]} == {"api", "worker"}
    for one in found:
        service = SERVICES[one["names"][0]]
        assert service["environment"]["LEASEHOLD_METRICS_PORT"] == one["port"]
        assert service["environment"]["LEASEHOLD_METRICS_HOST"] == "0.0.0.0"
        assert not any(str(one["port"]) in port for port in service.get("ports", []))


def test_the_dashboards_lie_where_grafana_looks_for_them() -> None:
    (provider,) = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/leasehold.yaml").read_text())["providers"]
    volumes = SERVICES["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes
