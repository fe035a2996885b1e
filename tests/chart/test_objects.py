"""What the rendered objects promise: who may do what, what starts after what, and what goes when."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from grafana.build import files
from leasehold.api.fleet.scaling import Scaling
from leasehold.file_secrets import holds_secrets
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.operations.pipeline import OPERATION
from leasehold.pipelines.webhooks.pipeline import WEBHOOK
from leasehold.security.cells import parse
from leasehold.settings import Settings
from leasehold.worker.attempts.runner import LONGEST_TO_FINISH_SECONDS
from tests.chart.helm import CHART, VALUES, environment, every_values, helm, objects, pods, refused, rendered

PRIVATE_4 = {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"}
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
KEDA = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}


@every_values
def test_no_pod_has_more_rights_than_it_needs(values: str) -> None:
    for name, pod in pods(values).items():
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001  # deploy/Dockerfile's
        assert spec["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,  # sets no_new_privs: without it no process may add a filter of its own
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert all(volume.keys() & {"emptyDir", "projected"} for volume in spec["volumes"])
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}


@every_values
def test_no_object_grants_rights_or_holds_a_secret(values: str) -> None:
    kinds = {one["kind"] for one in rendered(values)}
    assert not kinds & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount", "Secret"}
    assert kinds <= {
        "Deployment", "Job", "Service", "PodDisruptionBudget", "NetworkPolicy", "Ingress", "ConfigMap",
        "HorizontalPodAutoscaler", "ScaledObject", "TriggerAuthentication", "ServiceMonitor", "PrometheusRule",
        "HTTPRoute",
    }  # fmt: skip


@every_values
def test_secrets_are_files_that_are_mounted_where_the_variables_say(values: str) -> None:
    for pod in pods(values).values():
        (sources,) = [
            volume["projected"]["sources"] for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"
        ]
        mounted = {f"/run/leasehold/{item['path']}" for source in sources for item in source["secret"]["items"]}
        variables = {name: value for name, value in environment(pod).items() if name.endswith("_FILE")}
        variables.pop("LEASEHOLD_CELLS_FILE", None)  # no secret: a ConfigMap has it
        named = set(variables.values())
        assert mounted == named
        assert "/run/leasehold/database_url" in mounted
        (container,) = pod["spec"]["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "secrets"]
        assert mount == {"name": "secrets", "mountPath": "/run/leasehold", "readOnly": True}  # no subPath: it stays old


@every_values
def test_no_object_holds_a_secret_in_a_variable(values: str) -> None:
    secret = {f"LEASEHOLD_{n.upper()}" for n, of in Settings.model_fields.items() if holds_secrets(of.annotation)}
    for pod in pods(values).values():
        (container,) = pod["spec"]["containers"]
        assert not secret & environment(pod).keys()
        assert "envFrom" not in container
        assert all(variable.keys() == {"name", "value"} for variable in container["env"])


def test_a_standby_is_named_to_all_that_read_from_it_and_not_to_the_migration() -> None:
    named = {name: "LEASEHOLD_DATABASE_REPLICA_URL_FILE" in environment(pod) for name, pod in pods("fleet").items()}
    assert any("migrate" in name for name in named)
    assert {name for name, is_named in named.items() if not is_named} == {name for name in named if "migrate" in name}
    assert not any("LEASEHOLD_DATABASE_REPLICA_URL_FILE" in environment(pod) for pod in pods("least").values())


@every_values
def test_the_migration_ends_before_anything_else_starts(values: str) -> None:
    (job,) = objects(values, "Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["activeDeadlineSeconds"] >= Settings(_env_file=None).migrate_seconds
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["leasehold", "migrate"]
    # A hook runs before the release's objects exist: the Job may name none of them.
    assert not {volume for volume in json.dumps(job).split('"') if volume.startswith("configMap")}
    policies = [one for one in objects(values, "NetworkPolicy").values() if one["metadata"]["name"].endswith("migrate")]
    for policy in policies:
        annotations = policy["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert int(annotations["helm.sh/hook-weight"]) < int(job["metadata"]["annotations"]["helm.sh/hook-weight"])
    hooks = {one["kind"] for one in rendered(values) if "helm.sh/hook" in one["metadata"].get("annotations", {})}
    assert hooks <= {"Job", "NetworkPolicy"}


def test_every_pod_can_be_put_on_the_nodes_that_the_release_may_use() -> None:
    """On nodes with a taint nothing starts that tolerates none: neither a worker, nor the migration before it."""
    tolerations = [{"key": "batch", "operator": "Exists", "effect": "NoSchedule"}]
    pod = json.dumps({"tolerations": tolerations, "annotations": {"a": "b"}})
    places = ("migrate.pod", "api.pod", "console.pod", "workers.defaults.pod")
    for name, made in pods("least", *(f"{place}={pod}" for place in places)).items():
        assert made["spec"]["tolerations"] == tolerations, name
        assert made["metadata"]["annotations"] == {"a": "b"}, name


def test_the_migration_connects_as_the_owner_and_nothing_else_does() -> None:
    made = pods("least")
    owner = made.pop("jobs-leasehold-migrate")
    assert "leasehold-owner" in json.dumps(owner)
    assert environment(owner)["LEASEHOLD_DATABASE_APP_ROLE"] == "leasehold_app"
    assert "leasehold-owner" not in json.dumps(made)


@every_values
def test_a_pod_has_time_to_end(values: str) -> None:
    for name, pod in pods(values).items():
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        (container,) = pod["spec"]["containers"]
        if "worker" in name:
            # A drain waits for each short step that is not cancelable, in whichever queue it is.
            assert grace == int(environment(pod)["LEASEHOLD_DRAIN_SECONDS"]) + LONGEST_TO_FINISH_SECONDS + 15
        elif "migrate" not in name:
            slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert grace >= slept + 15 + 10  # api/main.py gives requests 15 seconds


@every_values
def test_probes_ask_what_the_processes_answer(values: str) -> None:
    for name, pod in pods(values).items():
        (container,) = pod["spec"]["containers"]
        if "migrate" in name:
            continue
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        asked = {probe: container[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe", "startupProbe")}
        assert asked["livenessProbe"]["path"] == "/livez"
        assert asked["readinessProbe"]["path"] == "/readyz"
        assert asked["startupProbe"]["path"] == "/livez"  # who works while its children load is not ended
        assert {probe["port"] for probe in asked.values()} <= ports.keys()
        assert int(environment(pod)["LEASEHOLD_METRICS_PORT"]) == ports["metrics"]
        assert environment(pod)["LEASEHOLD_METRICS_HOST"] == "::"
        if "http" in ports:
            assert ports["http"] == Settings(_env_file=None).api_port
            assert environment(pod)["LEASEHOLD_API_HOST"] == "::"


@every_values
def test_every_selector_finds_the_pods_that_it_means_and_no_other(values: str) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(values).items()}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, of in labels.items() if selector.items() <= of.items()}

    for name, one in objects(values, "Deployment").items():
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {name}
    for name, one in objects(values, "PodDisruptionBudget").items():
        assert chosen(one["spec"]["selector"]["matchLabels"]) == {name}
    assert objects(values, "PodDisruptionBudget").keys() == objects(values, "Deployment").keys()
    for name, one in objects(values, "Service").items():
        expected = labels.keys() - {"jobs-leasehold-migrate"} if name.endswith("-metrics") else {name}
        assert chosen(one["spec"]["selector"]) - {"jobs-leasehold-migrate"} == expected
    policies = objects(values, "NetworkPolicy").values()
    covered = [chosen(one["spec"]["podSelector"]["matchLabels"]) for one in policies]
    assert not covered or set.union(*covered) == labels.keys()


@every_values
def test_the_pods_of_a_deployment_are_spread_and_roll_without_a_gap(values: str) -> None:
    for name, one in objects(values, "Deployment").items():
        spread = one["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert [at["topologyKey"] for at in spread] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
        assert all(at["labelSelector"] == one["spec"]["selector"] for at in spread), name
        assert all(at["whenUnsatisfiable"] == "ScheduleAnyway" for at in spread)  # one node is enough
        assert one["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@every_values
def test_a_node_is_drained_a_few_pods_at_a_time_also_while_the_database_is_away(values: str) -> None:
    for name, one in objects(values, "PodDisruptionBudget").items():
        assert one["spec"]["maxUnavailable"] == ("25%" if "-worker-" in name else 1)  # never 0: it would hold the node
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_pool_serves_its_queues_with_its_own_resources() -> None:
    made = pods("fleet")
    models = environment(made["jobs-leasehold-worker-models"])
    assert models["LEASEHOLD_WORKER_POOL"] == "models"
    assert models["LEASEHOLD_WORKER_QUEUES"] == "conversion"
    assert models["LEASEHOLD_WORKER_LABELS"] == "gpu"
    assert (models["LEASEHOLD_WORKER_CHILDREN"], models["LEASEHOLD_DRAIN_SECONDS"]) == ("1", "600")
    assert made["jobs-leasehold-worker-models"]["spec"]["nodeSelector"] == {"accelerator": "yes"}
    assert made["jobs-leasehold-worker-pictures"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "8Gi"
    assert "webhooks" in environment(made["jobs-leasehold-worker-default"])["LEASEHOLD_WORKER_QUEUES"].split(",")


@every_values
def test_every_queue_that_ships_has_a_pool(values: str) -> None:
    """Else its work is accepted and never starts."""
    served = [environment(pod)["LEASEHOLD_WORKER_QUEUES"] for name, pod in pods(values).items() if "-worker-" in name]
    shipped = {step.queue for kind in (*SHIPPED, WEBHOOK, OPERATION) for of in kind.pipelines for step in of.steps}
    assert "" in served or shipped <= {queue for queues in served for queue in queues.split(",")}


def test_the_default_pool_can_be_taken_away() -> None:
    assert "jobs-leasehold-worker-default" in pods("least", 'workers.pools={"pictures":{"queues":["media"]}}')
    alone = objects("least", "Deployment", 'workers.pools={"default":null,"all":{}}')
    assert [name for name in alone if "-worker-" in name] == ["jobs-leasehold-worker-all"]


def test_the_api_knows_each_pool_as_its_workers_are() -> None:
    """What GET /v1/scaling answers is of the declared queues: a difference would scale by another's work."""
    made = pods("fleet")
    declared = json.loads(environment(made["jobs-leasehold-api"])["LEASEHOLD_POOLS"])
    settings = Settings(_env_file=None, pools=declared)
    for name, pool in settings.pools.items():
        worker = environment(made[f"jobs-leasehold-worker-{name}"])
        assert ",".join(pool.queues) == worker["LEASEHOLD_WORKER_QUEUES"]
        assert ",".join(pool.labels) == worker["LEASEHOLD_WORKER_LABELS"]
    assert (settings.pools["models"].target_wait_seconds, settings.pools["models"].most) == (300, 20)
    for name, one in objects("fleet", "ScaledObject").items():
        pool = settings.pools[name.removeprefix("jobs-leasehold-worker-")]
        assert one["spec"]["scaleTargetRef"]["name"] == name
        assert (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"]) == (pool.least, pool.most)
        url = one["spec"]["triggers"][0]["metadata"]["url"]
        assert url == f"http://jobs-leasehold-api.work.svc/v1/scaling/{name.removeprefix('jobs-leasehold-worker-')}"
        assert "jobs-leasehold-api" in objects("fleet", "Service")


def test_keda_reads_the_workers_that_are_wanted_and_shrinks_a_pool_when_it_has_been_calm() -> None:
    (authentication,) = objects("fleet", "TriggerAuthentication").values()
    (key,) = authentication["spec"]["secretTargetRef"]
    assert key == {"parameter": "token", "name": "leasehold-keda", "key": "api_key"}
    calm = "workers.defaults.autoscaling.calmSeconds=450"
    for one in objects("fleet", "ScaledObject", calm).values():
        (trigger,) = one["spec"]["triggers"]
        assert trigger["metadata"]["valueLocation"] in Scaling.model_fields
        assert trigger["metadata"]["valueLocation"] == "wanted"
        assert (trigger["metricType"], trigger["metadata"]["targetValue"]) == ("AverageValue", "1")  # a pod for each
        assert trigger["metadata"]["authMode"] == "bearer"
        assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
        behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior == {"scaleDown": {"stabilizationWindowSeconds": 450}}  # it grows immediately
        assert one["spec"]["cooldownPeriod"] == 450


def test_without_keda_a_pool_is_scaled_by_the_cpu_that_it_requests() -> None:
    (one,) = objects("cpu", "HorizontalPodAutoscaler").values()
    assert one["spec"]["scaleTargetRef"]["name"] == one["metadata"]["name"] == "jobs-leasehold-worker-default"
    assert (one["spec"]["minReplicas"], one["spec"]["maxReplicas"]) == (2, 8)
    (metric,) = one["spec"]["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
    assert one["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    (container,) = pods("cpu")["jobs-leasehold-worker-default"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"]  # the percentage is of it


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (['workers.defaults.autoscaling={"by": "keda", "min": 5, "max": 2}'], "workers.pools.default: autoscaling.min"),
        (['workers.pools={"a": {"autoscaling": {"by": "cpu", "min": 11}}}'], "workers.pools.a: autoscaling.min is"),
        (['api.autoscaling={"by": "cpu", "min": 5, "max": 2}'], "api: autoscaling.min is above autoscaling.max"),
    ],
)
def test_bounds_that_no_autoscaler_takes_are_refused_before_the_migration(values: list[str], sentence: str) -> None:
    assert sentence in refused(*values)


ASLEEP = 'workers.defaults.autoscaling={"by": "keda", "min": 0}'


@pytest.mark.parametrize(
    "values",
    [[ASLEEP], [ASLEEP, 'workers.pools={"a": {}, "default": {"autoscaling": {"by": "none"}, "replicas": 0}}']],
)
def test_a_fleet_of_which_nobody_may_be_left_is_refused(values: list[str]) -> None:
    """Workers fire schedules, admit held jobs, end jobs at their deadlines and send webhooks. KEDA starts none."""
    assert "at least one pool must keep a worker" in refused(*values)


@pytest.mark.parametrize(
    "own",
    ['{"autoscaling": {"min": 1}}', '{"autoscaling": {"by": "none"}}', '{"autoscaling": {"by": "cpu", "min": 1}}'],
)
def test_a_pool_may_sleep_while_another_has_a_worker(own: str) -> None:
    pools = f'workers.pools={{"pictures": {{}}, "default": {own}}}'
    made = helm("template", "jobs", CHART, "--set-json", ASLEEP, "--set-json", pools)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("values", ["{}", '{"pictures-of-the-whole-company": {}}'])
def test_a_name_that_is_too_long_is_refused_before_the_migration(values: str) -> None:
    """Of a Service, a Job, or a label of KEDA's. Kubernetes would refuse it when the migration has run."""
    pools = ("--set-json", f"workers.pools={values}")
    room = 63 - len("-leasehold-worker-") - max(map(len, {"default": {}, **json.loads(values)}))
    fits = helm("template", "r" * room, CHART, *pools)
    assert fits.returncode == 0, fits.stderr
    assert max(len(one["metadata"]["name"]) for one in yaml.safe_load_all(fits.stdout) if one) == 63
    assert "has more than 63 characters" in helm("template", "r" * (room + 1), CHART, *pools).stderr


@pytest.mark.parametrize(("values", "number"), [("fleet", 4), ("cpu", 1), ("least", 0)])
def test_what_is_scaled_has_no_number_of_replicas_of_its_own(values: str, number: int) -> None:
    """Else each upgrade would set the number back."""
    scalers = objects(values, "ScaledObject") | objects(values, "HorizontalPodAutoscaler")
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in scalers.values()}
    assert len(scaled) == number
    for name, one in objects(values, "Deployment").items():
        assert ("replicas" in one["spec"]) == (name not in scaled), name


def test_a_number_is_written_as_it_is_meant_and_a_mapping_as_json() -> None:
    api = environment(pods("fleet")["jobs-leasehold-api"])
    assert api["LEASEHOLD_PICTURE_MAX_BYTES"] == "33554432"
    assert api["LEASEHOLD_TRACES"] == "true"
    assert json.loads(api["LEASEHOLD_CONSOLE_OIDC_ROLES"])["sre"]["role"] == "admin"
    fraction = environment(pods("least", "settings.poll_seconds=0.5")["jobs-leasehold-api"])
    assert fraction["LEASEHOLD_POLL_SECONDS"] == "0.5"
    chosen: dict[str, Any] = {name.removeprefix("LEASEHOLD_").lower(): value for name, value in api.items()
              if name.startswith("LEASEHOLD_") and not name.endswith("_FILE")}  # fmt: skip
    for name in ("console_oidc_roles", "pools"):
        chosen[name] = json.loads(chosen[name])
    Settings(_env_file=None, **chosen)  # the platform itself takes them


def test_the_console_is_served_once() -> None:
    apart, together = pods("least"), pods("small")
    assert apart["jobs-leasehold-console"]["spec"]["containers"][0]["args"] == ["leasehold", "console"]
    assert environment(apart["jobs-leasehold-api"])["LEASEHOLD_CONSOLE"] == "off"
    assert environment(apart["jobs-leasehold-console"]).get("LEASEHOLD_CONSOLE", "on") != "off"
    assert "jobs-leasehold-console" not in together
    assert environment(together["jobs-leasehold-api"]).get("LEASEHOLD_CONSOLE", "on") == "on"


def test_an_app_is_named_to_every_process_that_loads_it() -> None:
    commands = {name: pod["spec"]["containers"][0]["args"] for name, pod in pods("small").items()}
    assert commands["jobs-leasehold-api"] == ["leasehold", "api", "shop:app"]
    assert commands["jobs-leasehold-worker-default"] == ["leasehold", "worker", "shop:app"]
    # `leasehold migrate` takes no argument. Without the app it would leave the schemas of its kinds behind. In the pods
    # somebody runs `leasehold doctor`, which would examine another program than the pod's.
    others = 'settings.pipelines="other:app"', 'api.settings.pipelines="other:app"'  # the argument goes before these
    for made in (pods("small"), pods("small", "console.enabled=true"), pods("small", *others)):
        assert {environment(pod)["LEASEHOLD_PIPELINES"] for pod in made.values()} == {"shop:app"}
    for pod in pods("least").values():
        assert "LEASEHOLD_PIPELINES" not in environment(pod)


def test_images_are_named_by_tag_or_by_digest() -> None:
    images = {pod["spec"]["containers"][0]["image"] for values in ("least", "small", "fleet")
              for pod in pods(values).values()}  # fmt: skip
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f"registry.example/team/leasehold-api:{version}" in images
    assert "registry.example/team/leasehold-worker:1.2.3" in images
    assert any(image.startswith("registry.example/team/leasehold-api@sha256:") for image in images)


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert chart["version"] == chart["appVersion"]


def test_a_strict_network_lets_only_named_peers_through() -> None:
    policies = objects("strict", "NetworkPolicy")
    worker = policies["jobs-leasehold-worker"]["spec"]
    assert worker["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["ports"] for rule in worker["ingress"]] == [[{"port": "metrics"}]]
    assert policies["jobs-leasehold-migrate"]["spec"]["ingress"] == []
    for name, one in policies.items():
        assert "ipBlock" not in json.dumps(one), name
        assert all(rule["from"] for rule in one["spec"]["ingress"])


def _peers(policy: dict[str, Any], port: str) -> list[dict[str, Any]] | None:
    """Who may reach the port; None: everybody."""
    (rule,) = [rule for rule in policy["spec"]["ingress"] if {"port": port} in rule["ports"]]
    peers: list[dict[str, Any]] | None = rule.get("from")
    return peers


def test_a_prometheus_that_scrapes_is_let_in() -> None:
    policies = objects("fleet", "NetworkPolicy")
    for component in ("api", "console", "worker"):
        assert _peers(policies[f"jobs-leasehold-{component}"], "metrics") == [MONITORING]
    assert "networkPolicy.scrapers" in refused("monitoring.serviceMonitor.enabled=true")
    assert "ServiceMonitor" in {one["kind"] for one in rendered("small", "monitoring.serviceMonitor.enabled=true")}


def test_keda_is_let_in_to_the_api_alone_where_it_scales() -> None:
    assert _peers(objects("fleet", "NetworkPolicy")["jobs-leasehold-api"], "http") is None
    (named,) = _peers(objects("strict", "NetworkPolicy")["jobs-leasehold-api"], "http") or []
    scaled = objects("strict", "NetworkPolicy", 'workers.defaults.autoscaling.by="keda"')
    assert _peers(scaled["jobs-leasehold-api"], "http") == [named, KEDA]
    assert _peers(scaled["jobs-leasehold-console"], "http") == [named]
    elsewhere = objects(
        "strict", "NetworkPolicy", 'workers.defaults.autoscaling.by="keda"', f"keda.operator={json.dumps([MONITORING])}"
    )
    assert _peers(elsewhere["jobs-leasehold-api"], "http") == [named, MONITORING]


@pytest.mark.parametrize("values", ["least", "fleet"])
def test_traces_reach_their_collector(values: str) -> None:
    traced = environment(pods("fleet")["jobs-leasehold-api"])["OTEL_EXPORTER_OTLP_ENDPOINT"]
    for component in ("api", "console", "worker"):
        egress = objects(values, "NetworkPolicy")[f"jobs-leasehold-{component}"]["spec"]["egress"]
        assert urlsplit(traced).port in {port["port"] for rule in egress for port in rule["ports"]}


def test_the_internet_is_never_the_cluster_s_own_network() -> None:
    def blocks(policy: dict[str, Any]) -> list[dict[str, Any]]:
        return [to["ipBlock"] for rule in policy["spec"]["egress"] for to in rule.get("to", []) if "ipBlock" in to]

    for name, one in objects("least", "NetworkPolicy").items():
        assert bool(blocks(one)) != name.endswith("migrate")
        for block in blocks(one):
            wanted = (
                {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"}
                if "." in block["cidr"]
                else {"fc00::/7"}
            )
            assert wanted <= set(block["except"])


def test_alerts_and_boards_are_those_of_the_repository() -> None:
    (rule,) = objects("fleet", "PrometheusRule").values()
    written = files()
    (rules,) = [text for path, text in written.items() if path.parts[-2:] == ("rules", "leasehold.yaml")]
    assert rule["spec"] == yaml.safe_load(rules)
    maps = {name: one["data"] for name, one in objects("fleet", "ConfigMap").items() if not name.endswith("-cells")}
    boards = {name: text for data in maps.values() for name, text in data.items()}
    assert boards == {path.name: text for path, text in written.items() if path.suffix == ".json"}


def test_prometheus_scrapes_every_process_under_the_name_that_the_alerts_know() -> None:
    (monitor,) = objects("fleet", "ServiceMonitor").values()
    services = [one for one in objects("fleet", "Service").values()
                if monitor["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()]  # fmt: skip
    assert [one["metadata"]["name"] for one in services] == ["jobs-leasehold-metrics"]
    assert services[0]["spec"]["publishNotReadyAddresses"] is True
    assert services[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]].startswith("leasehold")  # LeaseholdTargetDown
    assert [port["name"] for port in services[0]["spec"]["ports"]] == [monitor["spec"]["endpoints"][0]["port"]]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_each_process_of_a_cell_reads_the_map_and_the_migration_needs_none() -> None:
    (content,) = objects("fleet", "ConfigMap", 'monitoring.dashboards={"enabled": false}').values()
    cells = parse(content["data"]["cells.json"])
    assert (cells.addresses["a"], cells.tenants) == ("https://a.jobs.example", {"acme": "b"})
    for name, pod in pods("fleet").items():
        variables = environment(pod)
        mounted = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        if "migrate" in name:
            assert not {"LEASEHOLD_CELL", "LEASEHOLD_CELLS_FILE"} & variables.keys()
            assert "cells" not in mounted
            continue
        assert (variables["LEASEHOLD_CELL"], variables["LEASEHOLD_CELLS_FILE"]) == (
            "a", "/run/leasehold-cells/cells.json"
        )  # fmt: skip
        (at,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "cells"]
        assert at == "/run/leasehold-cells"
        assert mounted["cells"]["projected"]["sources"] == [{"configMap": {"name": content["metadata"]["name"]}}]


def test_the_gateway_sends_a_cell_the_keys_that_it_has_made() -> None:
    (route,) = objects("fleet", "HTTPRoute").values()
    (api,) = [name for name in objects("fleet", "Service") if name.endswith("-api")]
    keyed, other = route["spec"]["rules"]
    (header,) = keyed["matches"][0]["headers"]
    assert header["name"] == "Authorization"
    assert re.fullmatch(header["value"], "Bearer lh_a_0123456789ab_secret")
    assert not re.fullmatch(header["value"], "Bearer lh_b_0123456789ab_secret")
    assert {backend["name"] for rule in (keyed, other) for backend in rule["backendRefs"]} == {api}
    assert other["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    (alone,) = objects("fleet", "HTTPRoute", "cells.gateway.default=false").values()
    assert alone["spec"]["rules"] == [keyed]


def test_cells_at_private_addresses_are_reached_by_the_rule_of_the_documentation() -> None:
    page = (CHART.parents[2] / "docs/operations/kubernetes.md").read_text()
    (block,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "cells_keys" in text]
    values = yaml.safe_load(block)
    chosen = [f"networkPolicy.servers={json.dumps(values['networkPolicy']['servers'])}",
              f"secrets.cells_keys={json.dumps(values['secrets']['cells_keys'])}"]  # fmt: skip
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["networkPolicy"]["servers"]
    private = {"to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}], "ports": [{"port": 443}]}
    plain, ruled = objects("fleet", "NetworkPolicy"), objects("fleet", "NetworkPolicy", *chosen)
    for component in ("api", "console"):
        before, after = (of[f"jobs-leasehold-{component}"]["spec"]["egress"] for of in (plain, ruled))
        assert private not in before
        assert [rule for rule in after if rule not in before] == [*defaults, private]
        variables = environment(pods("fleet", *chosen)[f"jobs-leasehold-{component}"])
        assert variables["LEASEHOLD_CELLS_KEYS_FILE"].endswith("/cells_keys")


def test_the_values_of_the_documentation_are_values_of_the_chart(tmp_path: Path) -> None:
    page = (CHART.parents[2] / "docs/operations/kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        (tmp_path / "my.yaml").write_text(block)
        made = helm("template", "jobs", CHART, "--namespace", "jobs", "--values", tmp_path / "my.yaml")
        assert made.returncode == 0, made.stderr


def test_the_objects_that_the_documentation_asks_for_are_there() -> None:
    page = (CHART.parents[2] / "docs/operations/kubernetes.md").read_text()
    named = set(re.findall(r"(?:deploy|svc|job|networkpolicy)/(jobs-leasehold-[a-z-]+)", page))
    made = {one["metadata"]["name"] for one in rendered("least")}
    assert "jobs-leasehold-api" in named
    assert named <= made


@pytest.mark.parametrize("values", [path.stem for path in VALUES])
def test_the_notes_name_objects_that_are_there_and_the_ports_that_lead_anywhere(values: str) -> None:
    made = helm("install", "jobs", CHART, "--namespace", "work", "--values", CHART / f"ci/{values}.yaml",
                "--dry-run=client")  # fmt: skip
    assert made.returncode == 0, made.stderr
    notes = made.stdout.partition("\nNOTES:\n")[2]
    named = set(re.findall(r"(?:deploy|svc)/([a-z-]+)", notes))
    assert named == {"jobs-leasehold-api"} <= {one["metadata"]["name"] for one in rendered(values)}
    assert ("on port 5432, " in notes) == (values in ("least", "cpu"))


def test_the_secrets_of_the_documentation_are_those_that_the_pods_mount() -> None:
    page = (CHART.parents[2] / "docs/operations/kubernetes.md").read_text().replace("\\\n", " ")
    made = {}
    for name, rest in re.findall(r"create secret generic (\S+) (.*)", page):
        made[name] = {key.partition("=")[0] for key in re.findall(r"--from-(?:file|literal)=(\S+)", rest)}
    for pod in pods("least").values():
        (sources,) = [
            volume["projected"]["sources"] for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"
        ]
        for source in sources:
            assert {item["key"] for item in source["secret"]["items"]} <= made[source["secret"]["name"]]
    assert made["leasehold-keda"] == {"api_key"}


def test_an_installation_without_a_name_has_nothing_of_cells() -> None:
    for pod in pods("least").values():
        assert "LEASEHOLD_CELL" not in environment(pod)
    assert not [name for name in objects("least", "ConfigMap") if name.endswith("-cells")]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ('cells={"own": "c", "map": {"cells": {"a": "https://a.example"}}}', "has no cell"),
        ('cells={"own": "a", "map": {"cells": {"a": "https://a.example"}, "tenants": {"acme": "b"}}}', "lives in"),
        ('cells={"own": "a", "map": {"cells": {"a": "a.example"}}}', "pattern"),
        ('cells={"own": "A"}', "pattern"),
        ('cells={"own": "a", "map": {"cells": {"a": "https://a.example"}}, "gateway": {"enabled": true}}', "Gateway"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused_before_anything_is_installed(values: str, sentence: str) -> None:
    assert sentence in refused(values)
