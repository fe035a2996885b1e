"""The figures as a picture: a bar each, from the slowest to the fastest run a line, and the goal; one panel a unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from bench.figure import Figure

_WIDTH, _BAR, _PANEL = 9.0, 0.34, 0.9  # inches
_MET, _MISSED, _PLAIN, _RANGE = "#3b7d4f", "#b8453a", "#5a6b7d", "#20262d"


def draw(path: Path, figures: Sequence[Figure]) -> None:
    """Write the picture; the file's ending says which kind."""
    by_unit: dict[str, list[Figure]] = {}
    for figure in figures:
        by_unit.setdefault(figure.unit, []).append(figure)
    heights = [_PANEL + _BAR * len(some) for some in by_unit.values()]
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "bench", "axes.spines.top": False,
                         "axes.spines.right": False}):  # fmt: skip
        picture = Picture(figsize=(_WIDTH, sum(heights)), layout="constrained")
        panels = picture.subplots(len(by_unit), squeeze=False, gridspec_kw={"height_ratios": heights})
        for (axes,), (unit, some) in zip(panels, by_unit.items(), strict=True):
            _panel(axes, unit, some)
        picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Axes, unit: str, figures: Sequence[Figure]) -> None:
    places = range(len(figures))
    medians = [figure.median for figure in figures]
    below = [figure.median - min(figure.runs) for figure in figures]
    above = [max(figure.runs) - figure.median for figure in figures]
    axes.barh(places, medians, 0.6, color=[_color(figure) for figure in figures])
    axes.errorbar(medians, places, xerr=(below, above), fmt="none", ecolor=_RANGE, elinewidth=1, capsize=2)
    for place, figure in zip(places, figures, strict=True):
        if figure.goal is not None:
            axes.plot([figure.goal.value] * 2, [place - 0.4, place + 0.4], color=_RANGE, linestyle=":", linewidth=1.4)
    axes.set_yticks(places, [figure.name for figure in figures])
    axes.invert_yaxis()
    axes.set_xlabel(unit)


def _color(figure: Figure) -> str:
    if figure.goal is None:
        return _PLAIN
    return _MET if figure.goal.met_by(figure.median) else _MISSED
