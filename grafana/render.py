"""Renders the description of a board as Grafana's JSON, with Grafana's SDK."""

from __future__ import annotations

from itertools import count

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from grafana.describe import Board, Panel, Row, Variable

TAG = "leasehold"
_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_GRAPH_HEIGHT, _NUMBER_HEIGHT = 8, 4

_VERSIONS = "count by (role, version) (leasehold_build_info{})"
#: The marks on every graph: legend -> (expression, colour). Each sample of the expression is a mark.
MARKS = {
    "deployment": (f"{_VERSIONS.format('')} unless {_VERSIONS.format(' offset 2m')}", "blue"),
    "drain": ("leasehold_worker_draining == 1", "orange"),
}


def render(board: Board) -> str:
    """The JSON of the dashboard. The same description always gives the same JSON."""
    ids = count(1)
    builder = (
        builders.Dashboard(f"Leasehold / {board.title}")
        .uid(board.uid)
        .description(board.meaning)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            builders.DashboardLink("Leasehold")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(False)
            .keep_time(True)
        )
    )
    for variable in board.variables:
        builder = builder.with_variable(_variable(variable))
    for name, (expression, colour) in MARKS.items():
        builder = builder.annotation(_mark(name, expression, colour))
    for row in board.rows:
        builder = _add_row(builder, row, ids)
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


def _add_row(builder: builders.Dashboard, row: Row, ids: count[int]) -> builders.Dashboard:
    builder = builder.with_row(builders.Row(row.title).id(next(ids)))
    for panel in row.panels:
        build = _number if panel.kind == "number" else _graph
        builder = builder.with_panel(build(panel, next(ids)))
    return builder


def _variable(variable: Variable) -> builders.QueryVariable:
    return (
        builders.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(_SOURCE)
        .query(f"label_values({variable.metric}, {variable.label})")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _mark(name: str, expression: str, colour: str) -> builders.AnnotationQuery:
    return (
        builders.AnnotationQuery()
        .name(name)
        .datasource(_SOURCE)
        .enable(True)
        .icon_color(colour)
        .expr(expression)
        .step("60s")
        .title_format(name)
        .text_format("{{role}} {{version}} {{instance}}")
    )


def _graph(panel: Panel, panel_id: int) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .id(panel_id)
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(_GRAPH_HEIGHT)
        .min(0)
        .fill_opacity(8)
        .thresholds(_thresholds(panel))
        .legend(
            common_builders.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.warn is not None or panel.bad is not None:
        line = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        graph = graph.thresholds_style(line)
    for letter, (legend, expression) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        graph = graph.with_target(
            prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend).range().exemplar(True)
        )
    return graph


def _number(panel: Panel, panel_id: int) -> stat.Panel:
    (expression,) = panel.queries.values()
    return (
        stat.Panel()
        .id(panel_id)
        .title(panel.title)
        .description(panel.meaning)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(_NUMBER_HEIGHT)
        .thresholds(_thresholds(panel))
        .color_mode(common.BigValueColorMode.BACKGROUND)
        .graph_mode(common.BigValueGraphMode.AREA)
        .with_target(prometheus.Dataquery().ref_id("A").expr(expression).range())
    )


def _thresholds(panel: Panel) -> builders.ThresholdsConfig:
    """The colours of the panel's values. Each threshold gives the colour of the values from it on, from low to high;
    the first has no value.
    """
    if not panel.low_is_bad:
        lowest, thresholds = "green", [(panel.warn, "orange"), (panel.bad, "red")]
    elif panel.warn is None:
        lowest, thresholds = "red", [(panel.bad, "green")]
    else:
        lowest, thresholds = "red", [(panel.bad, "orange"), (panel.warn, "green")]
    steps = [dashboard.Threshold(value=None, color=lowest)]
    steps += [dashboard.Threshold(value=value, color=colour) for value, colour in thresholds if value is not None]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
