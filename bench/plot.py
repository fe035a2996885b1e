"""Draws the figures, one panel for each unit. A figure is a bar, with a line from its lowest to its highest run, and a
mark at its goal.

A figure with a curve is drawn as the curve instead. Curves along the same axis and of the same unit share a panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from bench.figure import Curve, Figure

_WIDTH, _BAR, _PANEL, _LINES = 9.0, 0.34, 0.9, 2.6  # inches
_WIDE = 100  # an axis whose largest value is this many times its smallest is logarithmic
_MET, _MISSED, _PLAIN, _RANGE = "#3b7d4f", "#b8453a", "#5a6b7d", "#20262d"


def draw(path: Path, figures: Sequence[Figure]) -> None:
    """Write the picture into the file, whose ending says the format."""
    by_unit: dict[str, list[Figure]] = {}
    by_axes: dict[tuple[str, str], list[Curve]] = {}
    for figure in figures:
        if figure.curve is None:
            by_unit.setdefault(figure.unit, []).append(figure)
        else:
            by_axes.setdefault((figure.curve.along, figure.curve.unit), []).append(figure.curve)
    heights = [_PANEL + _BAR * len(unit_figures) for unit_figures in by_unit.values()] + [_LINES] * len(by_axes)
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "bench", "axes.spines.top": False,
                         "axes.spines.right": False}):  # fmt: skip
        picture = Picture(figsize=(_WIDTH, sum(heights)), layout="constrained")
        panels = iter(picture.subplots(len(heights), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])
        for unit, unit_figures in by_unit.items():
            _panel(next(panels), unit, unit_figures)
        for (along, unit), curves in by_axes.items():
            _lines(next(panels), along, unit, curves)
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


def _lines(axes: Axes, along: str, unit: str, curves: Sequence[Curve]) -> None:
    by_label: dict[str, list[tuple[float, float]]] = {}
    for curve in curves:
        by_label.setdefault(curve.label, []).extend(curve.points)
    for label, points in by_label.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1.4, label=label)
    places = [place for points in by_label.values() for place, _ in points]
    if max(places) >= _WIDE * min(places) > 0:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(along)
    axes.set_ylabel(unit)
    axes.legend(frameon=False)


def _color(figure: Figure) -> str:
    if figure.goal is None:
        return _PLAIN
    return _MET if figure.goal.met_by(figure.median) else _MISSED
