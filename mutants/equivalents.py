"""The mutants that no test can notice, each with its reason: the table of docs/explanation/mutants.md."""

from __future__ import annotations

import re

from mutants.places import ROOT

_PAGE = ROOT / "docs" / "explanation" / "mutants.md"
_ROW = re.compile(r"^\| `([0-9a-f]{8})`[^|]*\| (.+?) \| (.+?) \|$", re.MULTILINE)


def equivalents() -> dict[str, str]:
    """Id of a mutant -> why no test can notice it."""
    return {row[1]: row[3] for row in _ROW.finditer(_PAGE.read_text())}
