"""The dashboards, alerts and runbooks that are shipped: generated, well-formed, and right on known series."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from grafana.alert_cases import CASES
from grafana.alerts import all_alerts
from grafana.boards import BOARDS
from grafana.build import HERE, files
from grafana.render import render
from tests.support.prometheus import Programs, install_prometheus, run_promtool

ROOT = Path(__file__).parents[2]
#: Of what Grafana calls a panel, what ours need to be drawn.
DRAWN = {"id", "type", "title", "description", "gridPos", "datasource", "targets", "fieldConfig", "options"}
KINDS = {"timeseries", "stat"}
UNITS = {"short", "s", "bytes", "percentunit", "reqps", "ops", "none"}


@pytest.fixture(scope="session")
async def programs() -> Programs:
    return await install_prometheus()


def panels(uid: str) -> list[dict[str, Any]]:
    board = orjson.loads((HERE / f"dashboards/{uid}.json").read_bytes())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("path", [str(path.relative_to(HERE)) for path in files()])
def test_what_is_shipped_is_what_the_description_gives(path: str) -> None:
    """`scripts/dashboards` writes them."""
    assert (HERE / path).read_text() == files()[HERE / path]


def test_nothing_is_shipped_that_is_not_described() -> None:
    assert set((HERE / "dashboards").iterdir()) == {path for path in files() if path.parent.name == "dashboards"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_says_what_it_shows_and_can_be_drawn(board: Any) -> None:
    found = panels(board.uid)
    assert found
    for panel in found:
        assert panel.keys() >= DRAWN, panel["title"]
        assert panel["type"] in KINDS
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0].get("value") is None
    assert len({panel["id"] for panel in found}) == len(found)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_lie_beside_each_other_within_the_grid(board: Any) -> None:
    places = [panel["gridPos"] for panel in orjson.loads(render(board))["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


def test_the_number_of_firing_alerts_is_of_ours() -> None:
    """Where a Prometheus watches other things, too, one of its alerts may always fire."""
    (panel,) = [panel for panel in panels("leasehold-overview") if panel["title"] == "Firing alerts"]
    (target,) = panel["targets"]
    (names,) = re.findall(r'ALERTS\{[^}]*alertname=~"([^"]+)"', target["expr"])
    assert all(re.fullmatch(names, alert.name) for alert in all_alerts())
    assert not re.fullmatch(names, "Watchdog")


def test_dashboards_lead_to_each_other_and_mark_deployments_and_drains() -> None:
    for board in BOARDS:
        said = orjson.loads(render(board))
        assert [link["tags"] for link in said["links"]] == [["leasehold"]]
        assert {mark["name"] for mark in said["annotations"]["list"]} == {"deployment", "drain"}


def test_every_alert_has_a_runbook_that_names_it_and_every_runbook_an_alert() -> None:
    named = {alert.runbook: [a.name for a in all_alerts() if a.runbook == alert.runbook] for alert in all_alerts()}
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/operations/runbooks").glob("*.md")}
    assert pages.keys() == named.keys()
    for runbook, alerts in named.items():
        assert all(f"`{alert}`" in pages[runbook] for alert in alerts)
        assert re.findall("^## (.+)$", pages[runbook], re.MULTILINE) == ["Meaning", "First look", "Fix"]


def test_every_alert_has_a_case_in_which_it_must_fire() -> None:
    assert {case.alert for case in CASES} == {alert.name for alert in all_alerts()}
    assert len({(case.alert, case.when) for case in CASES}) == len(CASES)


def test_what_tenants_do_wrong_pages_nobody() -> None:
    """A job also fails because of a tenant's handler, limit or address of a webhook, whatever the platform does."""
    expressions = {alert.name: alert.expression for alert in all_alerts() if alert.severity == "page"}
    of_outcomes = re.compile(r"job_failures|job_outcomes|jobs_finished|dead_letters|attempts_total|retries_total")
    assert [name for name, expression in expressions.items() if of_outcomes.search(expression)] == []
    of_failures = [(a.name, a.severity) for a in all_alerts() if "job_failures" in a.expression]
    assert of_failures == [("LeaseholdJobsFailingSlow", "ticket")]


async def test_every_alert_fires_in_its_case_and_none_on_a_healthy_day(programs: Programs) -> None:
    code, said = await run_promtool(programs, "test", "rules", str(HERE / "prometheus/tests/leasehold.yaml"))
    assert code == 0, said[-3000:]


async def test_an_alert_that_does_not_fire_would_be_noticed(programs: Programs, tmp_path: Path) -> None:
    """The same tests against rules in which one alert can never fire."""
    rules = yaml.safe_load((HERE / "prometheus/rules/leasehold.yaml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        if rule.get("alert") == "LeaseholdLeasesStuck":
            rule["expr"] = "vector(0) > 1"
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/leasehold.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "tests").mkdir()
    shipped = yaml.safe_load((HERE / "prometheus/tests/leasehold.yaml").read_text())
    shipped["tests"] = [test for test in shipped["tests"] if "LeasesStuck" in test["name"]]
    (tmp_path / "tests/leasehold.yaml").write_text(yaml.safe_dump(shipped))
    code, said = await run_promtool(programs, "test", "rules", str(tmp_path / "tests/leasehold.yaml"))
    assert code != 0
    assert "LeaseholdLeasesStuck" in said


async def test_the_rules_are_rules_to_prometheus(programs: Programs) -> None:
    code, said = await run_promtool(programs, "check", "rules", str(HERE / "prometheus/rules/leasehold.yaml"))
    assert code == 0, said
    code, said = await run_promtool(programs, "check", "config", str(HERE / "prometheus/prometheus.yaml"))
    assert code == 0, said


def test_every_metric_is_documented_and_nothing_else_is() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    documented = set(re.findall(r"^\| (.+?) \|", text, re.MULTILINE))
    named = {name for cell in documented for name in re.findall(r"`(leasehold_\w+)`", cell)}
    asked = {name for board in BOARDS for name in re.findall(r"\b(leasehold_[a-z_]+)", render(board))}
    asked |= {name for alert in all_alerts() for name in re.findall(r"\b(leasehold_[a-z_]+)", alert.expression)}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert families <= named
    places = (ROOT / "worker", ROOT / "api", ROOT / "leasehold")
    sources = "".join(path.read_text() for place in places for path in place.rglob("*.py"))
    for name in named:
        stem = name.removeprefix("leasehold_").removesuffix("_total")
        assert f'"{stem}' in sources or f'"leasehold_{stem}' in sources, name
