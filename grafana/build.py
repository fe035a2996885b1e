"""The program of `scripts/dashboards`: writes the files of Grafana and Prometheus from the descriptions here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grafana.alert_cases import tests
from grafana.alerts import rules
from grafana.boards import BOARDS
from grafana.render import render

HERE = Path(__file__).parent
_HEAD = "# Written by scripts/dashboards from grafana/alerts.py and grafana/alert_cases.py.\n"


def files() -> dict[Path, str]:
    """The path and the text of every file to write."""
    boards = {HERE / "dashboards" / f"{board.uid}.json": render(board) for board in BOARDS}
    return boards | {
        HERE / "prometheus/rules/leasehold.yaml": _HEAD + _yaml(rules()),
        HERE / "prometheus/tests/leasehold.yaml": _HEAD + _yaml(tests("../rules/leasehold.yaml")),
    }


def _yaml(document: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, width=200)
    return text


def main() -> None:
    for path, text in files().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
