"""The names of the files that both toolchains write, and helpers for their reports and progress. One toolchain is the
platform's own, made of open-source libraries. The other is that of the vendor Kneron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from leasehold.domain.verdicts import File
from leasehold.domain.work import Work

BINARY = "application/octet-stream"
# BIE and NEF are the vendor's names. A BIE file is the int8 model, and a NEF file is the package that a chip loads.
ONNX, BIE, NEF = "output/out.onnx", "output/out.bie", "output/out.nef"
ONNX_REPORT, BIE_REPORT, REPORT = "output/onnx-report.json", "output/bie-report.json", "output/report.json"


def report_progress(work: Work, percent: float, summary: str) -> None:
    """Record how far the step is. Raises Cancelled if the job was cancelled, so a step calls this often."""
    work.progress(percent, summary)
    work.checkpoint()


def json_file(work: Work, name: str, report: dict[str, Any]) -> dict[str, File]:
    """Write the report. Returns it as the output `name`."""
    path = work.directory / name.rpartition("/")[2]
    path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    return {name: File(path, "application/json")}


def read_json(path: Path) -> Any:
    return orjson.loads(path.read_bytes())


def earlier_reports(bie_report: Path) -> dict[str, Any]:
    """The reports of the steps `onnx` and `bie`, for the step `nef`. The file with the report of `bie` also contains
    the report of `onnx`. Otherwise `nef` would have to read the outputs of the step `onnx`, and so would download the
    large optimised model with the report.
    """
    bie = read_json(bie_report)
    return {"onnx": bie.pop("onnx"), "bie": bie}
