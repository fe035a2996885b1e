"""Which tests judge a mutant in its fork."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.judging import Judging

pytest_plugins = ["pytester"]


def test_the_chosen_tests_run_in_their_order_and_those_with_new_parameters_with_all_of_them(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    file = pytester.makepyfile("""
        import pytest

        def test_last(): pass
        def test_not_chosen(): pass
        @pytest.mark.parametrize("n", [1, 2])
        def test_has_parameters_now(n): pass
        @pytest.mark.parametrize("n", [1, 2])
        def test_has_the_same(n): pass
    """)
    chosen = [f"{file.name}::{test}" for test in ("test_has_the_same[2]", "test_has_parameters_now", "test_last")]
    ran: list[str] = []

    class Ran:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            ran.append(nodeid.partition("::")[2])

    judging = Judging(chosen, [10.0] * len(chosen), tmp_path / "result.json")
    options = ["-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
    pytester.inline_run(file, *options, plugins=[judging, Ran()])
    assert ran == ["test_has_the_same[2]", "test_has_parameters_now[1]", "test_has_parameters_now[2]", "test_last"]
