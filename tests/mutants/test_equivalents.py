"""The table of mutants that change nothing names mutants that exist."""

from __future__ import annotations

from mutants.equivalents import equivalents
from mutants.places import mutants


def test_each_mutant_that_is_called_equivalent_still_exists() -> None:
    listed = equivalents()
    assert listed
    assert sorted(listed.keys() - {mutant.id for mutant in mutants()}) == []
