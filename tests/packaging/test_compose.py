"""What is shipped for Docker, as far as it can be checked without an engine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from leasehold.worker.attempts.runner import LONGEST_TO_FINISH_SECONDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
KNOWN = {f"LEASEHOLD_{name.upper()}" for name in Settings.model_fields}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


DIGEST = re.compile(r"[a-z0-9./-]+:[A-Za-z0-9._-]*\d+\.\d+[A-Za-z0-9._-]*@sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_by_digest_or_built_here(name: str) -> None:
    assert "build" in SERVICES[name] or DIGEST.fullmatch(SERVICES[name]["image"])


def test_what_our_images_are_built_from_is_pinned_by_digest() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) - stages
    assert bases
    assert all(DIGEST.fullmatch(base) for base in bases)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_says_when_it_is_healthy_or_runs_once(name: str) -> None:
    assert "healthcheck" in SERVICES[name] or SERVICES[name].get("restart") == "no"


@pytest.mark.parametrize("name", ["api", "worker"])
def test_a_process_of_the_platform_is_healthy_when_it_is_ready(name: str) -> None:
    """`docker compose up --wait` must not say that a worker is there which has no database, or serves no queue yet."""
    (asked,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", " ".join(SERVICES[name]["healthcheck"]["test"]))
    assert asked[1] == "/readyz"


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


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_fenced_in(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])  # by number, and not root
    assert 0 < service["pids_limit"] <= 1024
    assert any(mount.startswith("/tmp:size=") for mount in service["tmpfs"])  # noqa: S108 - the container's
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "userns_mode", "devices"}
    assert not any("docker.sock" in volume for volume in service.get("volumes", []))


def test_our_own_images_run_as_the_user_that_they_are_built_with() -> None:
    assert {SERVICES[name]["user"] for name in ("migrate", "api", "worker", "s3")} == {"10001:10001"}
    assert {SERVICES[name]["build"]["target"] for name in ("migrate", "api", "worker", "s3")} == {"api", "worker", "s3"}


def test_what_compose_builds_an_image_with_is_an_argument_of_the_image() -> None:
    """The engine ignores any other, so that the image would lack what somebody asked for."""
    assert SERVICES["worker"]["build"]["args"] == {"EXTRAS": "${WORKER_EXTRAS:-}"}
    assert "EXTRAS" in re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE)


#: Who has business with whom; everybody else cannot even open a connection.
CLIENTS = {
    "postgres": {"migrate", "api", "worker"},
    "rabbitmq": {"api", "worker", "prometheus"},
    "s3": {"api", "worker"},
    "prometheus": {"api", "worker", "rabbitmq", "grafana"},  # it asks the first three
    "grafana": {"prometheus"},
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_server_is_reached_by_those_who_need_it(name: str) -> None:
    own = set(SERVICES[name]["networks"])
    assert {other for other in SERVICES if other != name and own & set(SERVICES[other]["networks"])} == CLIENTS[name]


def test_servers_that_publish_nothing_are_on_internal_networks_alone() -> None:
    networks = COMPOSE["networks"]
    assert {network for service in SERVICES.values() for network in service["networks"]} == networks.keys()
    internal = {name for name, network in networks.items() if (network or {}).get("internal")}
    for name, service in SERVICES.items():
        if name not in ("api", "worker"):  # these go out: webhooks, providers
            assert set(service["networks"]) <= internal or service.get("ports"), name


SECRETS = {name for name in re.findall(r"\$\{([A-Z0-9_]+)", TEXT) if re.search("PASSWORD|SECRET|KEY", name)}


def test_no_secret_has_a_default_and_the_failure_names_the_command() -> None:
    assert len(SECRETS) == 7
    for name, rest in re.findall(r"\$\{([A-Z0-9_]+)([^}]*)\}", TEXT):
        assert rest == ":?run scripts/secrets" if name in SECRETS else rest.startswith(":-"), name
    assert not re.search(
        r"(?i)(password|secret|_pass|_key): *[\"']?[a-z0-9]", re.sub("S3_ACCESS_KEY: leasehold", "", TEXT)
    )


def test_the_secrets_are_made_once_each_another_and_for_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/secrets", ".env.example"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".env").write_text("OTHERS=1\nGRAFANA_PASSWORD=mine\nS3_SECRET_KEY=")
    for _ in range(2):
        before = (tmp_path / ".env").read_text()
        subprocess.run(["bash", tmp_path / "scripts/secrets"], check=True, capture_output=True)
    assert (tmp_path / ".env").read_text() == before  # the second time finds all of them
    made = dict(line.split("=", 1) for line in before.splitlines())
    assert (made["OTHERS"], made["GRAFANA_PASSWORD"]) == ("1", "mine")
    new = {made[name] for name in SECRETS - {"GRAFANA_PASSWORD", "SEALING_KEYS"}}
    assert len(new) == len(SECRETS) - 2
    assert all(re.fullmatch(r"[0-9a-f]{48}", secret) for secret in new)
    assert Sealing(Settings(_env_file=None, sealing_keys=SecretStr(made["SEALING_KEYS"]))).has_key
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600


def test_the_secrets_are_neither_committed_nor_sent_to_a_build() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert (ROOT / ".dockerignore").read_text().splitlines()[0] == "*"
    for line in (ROOT / ".env.example").read_text().splitlines():
        name, _, value = line.partition("=")
        assert name not in SECRETS or not value


def test_only_migrate_connects_as_the_owner_of_the_schema() -> None:
    users = {
        name: service["environment"]["LEASEHOLD_DATABASE_URL"].partition("://")[2].partition(":")[0]
        for name, service in SERVICES.items()
        if "LEASEHOLD_DATABASE_URL" in service.get("environment", {})
    }
    assert users == {"migrate": "leasehold_owner", "api": "leasehold_app", "worker": "leasehold_app"}
    assert SERVICES["migrate"]["environment"]["LEASEHOLD_DATABASE_APP_ROLE"] == "leasehold_app"
    script = (ROOT / "deploy/postgres/roles.sh").read_text()
    assert set(re.findall(r"CREATE ROLE (\w+)", script)) == set(users.values())
    assert os.access(ROOT / "deploy/postgres/roles.sh", os.X_OK)  # else the image would run it in its own shell


def test_migrate_has_no_secret_but_its_own() -> None:
    environment = SERVICES["migrate"]["environment"]
    assert environment.keys() == {"LEASEHOLD_DATABASE_URL", "LEASEHOLD_DATABASE_APP_ROLE", "LEASEHOLD_LOG_FORMAT"}


def test_a_worker_has_more_time_to_stop_than_it_takes_to_drain() -> None:
    """And than the answer to an order at a provider takes, for which a drain waits."""
    grace = seconds(SERVICES["worker"]["stop_grace_period"])
    assert grace > Settings(_env_file=None).drain_seconds + LONGEST_TO_FINISH_SECONDS


def test_every_port_is_bound_to_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_variables_that_compose_asks_for_are_in_the_example() -> None:
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", TEXT))
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


def test_every_package_of_the_wheel_is_in_the_image_and_what_its_links_lead_to() -> None:
    wheel = re.search(r"packages = \[(.+?)\]", (ROOT / "pyproject.toml").read_text())
    assert wheel is not None
    packages = re.findall(r'"(\w+)"', wheel[1])
    links = [path.readlink().name for package in packages for path in (ROOT / package).iterdir() if path.is_symlink()]
    assert sorted(links) == ["api", "migrations", "worker"]
    for folder in packages + links:
        assert f"COPY {folder} {folder}\n" in DOCKERFILE


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
        assert service["environment"]["LEASEHOLD_METRICS_HOST"] == "::"
        assert not any(str(one["port"]) in port for port in service.get("ports", []))


def test_prometheus_is_on_a_network_with_each_service_that_it_scrapes() -> None:
    configuration = yaml.safe_load((ROOT / "grafana/prometheus/prometheus.yaml").read_text())
    places = [
        place
        for job in configuration["scrape_configs"]
        for kind in job.values()
        if isinstance(kind, list)
        for place in kind
    ]
    names = {
        name.partition(":")[0] for place in places for name in (*place.get("names", []), *place.get("targets", []))
    }
    own = set(SERVICES["prometheus"]["networks"])
    assert {name for name in names - {"localhost"} if not own & set(SERVICES[name]["networks"])} == set()
    assert {"api", "worker", "rabbitmq"} <= names


def test_the_dashboards_lie_where_grafana_looks_for_them() -> None:
    (provider,) = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/leasehold.yaml").read_text())["providers"]
    volumes = SERVICES["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes
