"""The threat model names tests that exist, and everybody finds it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = (ROOT / "docs/explanation/threat-model.md").read_text()


def test_every_test_that_the_threat_model_names_exists() -> None:
    named = re.findall(r"`(tests/[^`]+)`", MODEL)
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists(), path


def test_the_readme_leads_to_it_and_to_how_to_report() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(docs/explanation/threat-model.md)" in readme
    assert "(SECURITY.md)" in readme
