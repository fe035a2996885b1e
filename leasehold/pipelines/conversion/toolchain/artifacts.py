"""What both toolchains leave behind, and how they say where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from leasehold.domain.verdicts import File
from leasehold.domain.work import Work

BINARY = "application/octet-stream"
ONNX, BIE, NEF = "output/out.onnx", "output/out.bie", "output/out.nef"
ONNX_REPORT, BIE_REPORT, REPORT = "output/onnx-report.json", "output/bie-report.json", "output/report.json"


def say(work: Work, percent: float, summary: str) -> None:
    """Between the parts of a step: tell how far it is, and stop when it was asked to."""
    work.progress(percent, summary)
    work.checkpoint()


def as_json(work: Work, name: str, report: dict[str, Any]) -> dict[str, File]:
    """The report as an output of that name."""
    path = work.directory / name.rpartition("/")[2]
    path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    return {name: File(path, "application/json")}


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())


def whole_report(bie_report: Path) -> dict[str, Any]:
    """The reports of the steps so far, apart: the second step carries the first one's along, so that the third need
    not fetch a large model for its report.
    """
    bie = read_json(bie_report)
    return {"onnx": bie.pop("onnx"), "bie": bie}
