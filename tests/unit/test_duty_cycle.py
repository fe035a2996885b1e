"""How seldom something costly is done."""

from __future__ import annotations

import pytest

from leasehold.runtime.duty_cycle import pause_after


@pytest.mark.parametrize(
    ("took", "pause"),
    [
        (0.0, 5.0),  # cheap: as often as is wished
        (0.02, 5.0),
        (0.2, 20.0),  # costly: so that it is a hundredth of the time
        (3.0, 60.0),  # but never more seldom than is promised
    ],
)
def test_what_takes_long_comes_more_seldom_within_its_bounds(took: float, pause: float) -> None:
    assert pause_after(took, share=0.01, at_least=5.0, at_most=60.0) == pytest.approx(pause)
