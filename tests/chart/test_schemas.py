"""What helm renders is what Kubernetes takes: five value files, four versions, and the custom resources."""

from __future__ import annotations

import json

import jsonschema
import kubernetes_validate
import pytest
import yaml

from leasehold.file_secrets import holds_secrets
from leasehold.settings import Settings
from tests.chart.custom_resources import SCHEMAS
from tests.chart.helm import CHART, VALUES, every_values, helm, pods, refused, rendered

VERSIONS = ("1.29", "1.33", "1.35", "1.37")


@every_values
def test_helm_finds_nothing_to_object_to(values: str) -> None:
    linted = helm("lint", "--strict", CHART, "--values", CHART / f"ci/{values}.yaml")
    assert linted.returncode == 0, linted.stdout
    assert "[WARNING]" not in linted.stdout


@every_values
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_kubernetes_takes(values: str, version: str) -> None:
    kinds = set()
    for one in rendered(values):
        if one["kind"] not in SCHEMAS:
            kubernetes_validate.validate(one, version, strict=True)
            kinds.add(one["kind"])
    assert {"Deployment", "Service", "PodDisruptionBudget", "Job"} <= kinds


def test_the_oldest_version_that_the_chart_takes_is_among_those_that_are_tried() -> None:
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    page = (CHART.parents[2] / "docs/operations/kubernetes.md").read_text()
    assert oldest == f">={VERSIONS[0]}.0-0"
    assert f"for Kubernetes {VERSIONS[0]} or newer" in page
    assert f"the schemas of Kubernetes {', '.join(VERSIONS[:-1])} and {VERSIONS[-1]}" in page


def test_the_validator_refuses_a_field_that_kubernetes_does_not_know() -> None:
    (job,) = [one for one in rendered("least") if one["kind"] == "Job"]
    wrong = json.loads(json.dumps(job))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_every_custom_resource_has_documented_fields_alone() -> None:
    met = set()
    for one in (one for path in VALUES for one in rendered(path.stem)):
        if one["kind"] in SCHEMAS:
            jsonschema.validate(one, SCHEMAS[one["kind"]])
            met.add(one["kind"])
    assert met == SCHEMAS.keys()


def test_an_installation_that_asks_for_no_operator_gets_no_custom_resource() -> None:
    assert not {one["kind"] for one in rendered("least")} & SCHEMAS.keys()


@pytest.mark.parametrize("values", [path.stem for path in VALUES])
def test_every_variable_is_a_setting(values: str) -> None:
    known = {f"LEASEHOLD_{name.upper()}" for name in Settings.model_fields}
    known |= {f"LEASEHOLD_{n.upper()}_FILE" for n, of in Settings.model_fields.items() if holds_secrets(of.annotation)}
    for pod in pods(values).values():
        (container,) = pod["spec"]["containers"]
        named = {one["name"] for one in container["env"]}
        assert {name for name in named if name.startswith("LEASEHOLD_")} <= known
        assert len(named) == len(container["env"])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("settings.database_pol_size=20", "database_pol_size"),
        ('settings.database_url="postgresql://u:p@h/d"', "database_url"),  # a secret never stands in a value
        ("settings.metrics_port=1", "metrics_port"),  # the probes need the chart's
        # A pool's `drainSeconds` sets it, and with it the time until Kubernetes kills the pod.
        ('workers.pools={"default":{"settings":{"drain_seconds":600}}}', "drain_seconds"),
        ("secrets.database_url=null", "database_url"),
        ('secrets.databaseurl={"secret":"a","key":"b"}', "databaseurl"),
        ('secrets.s3_secret_key="text"', "s3_secret_key"),
        ('workers.pools={"Big_Pool":{}}', "Big_Pool"),
        ('workers.pools={"default":{"queue":["a"]}}', "queue"),
        ('workers.defaults.autoscaling.by="cpu",workers.defaults.autoscaling.min=0', "min"),
        ('workers.defaults.autoscaling.by="magic"', "by"),
        ("api.ingress.enabled=true", "host"),
        ('seccompProfile={"type":"Unconfined"}', "seccompProfile"),
        ('cells={"own":"a","map":{"cells":{"a":"https://a.x"}},"gateway":{"hostnames":["Jobs_1"]}}', "hostnames"),
        ("replicas=3", "replicas"),
    ],
)
def test_a_value_that_would_do_nothing_or_harm_is_refused(wrong: str, reason: str) -> None:
    name, _, value = wrong.partition("=")
    both = [f"{name}={value}"] if ",workers" not in wrong else wrong.split(",", maxsplit=1)
    assert reason in refused(*both)


def test_the_default_values_are_all_in_the_schema_and_the_schema_names_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert yaml.safe_load((CHART / "values.yaml").read_text()).keys() == schema["properties"].keys() - {"global"}
