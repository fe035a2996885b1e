"""No test decides what a later test sees of the logs."""

from __future__ import annotations

import logging
import sys

import pytest
import structlog

from leasehold.app.logging import log_to_the_program
from leasehold.settings import Settings
from leasehold.telemetry.logs import configure_logs
from tests.support.logging_state import logging_as_before


def state() -> tuple[object, ...]:
    root = logging.getLogger()
    levels = [logging.getLogger(name).level for name in ("", "asyncio", "httpx2", "tests.a_new_logger")]
    switches = [logging._srcfile, logging.logThreads, logging.logProcesses, logging.logMultiprocessing]
    return root.handlers[:], levels, switches, structlog.is_configured(), structlog.get_config(), sys.path[:]


@pytest.mark.parametrize("was_configured", [False, True])
def test_a_test_leaves_the_logs_as_they_were(*, was_configured: bool) -> None:
    with logging_as_before():
        structlog.reset_defaults()
        if was_configured:
            log_to_the_program()
        before = state()
        with logging_as_before():
            configure_logs(Settings(log_format="json", _env_file=None))
            logging.getLogger().setLevel(logging.ERROR)
            logging.getLogger("tests.a_new_logger").setLevel(logging.CRITICAL)
            sys.path.append("/tmp/of-a-test")  # noqa: S108 - a name
            assert state() != before
        after = state()
    # structlog makes new defaults that are equal.
    assert (after[:4], after[5]) == (before[:4], before[5])
    assert not was_configured or after[4] == before[4]


def test_a_logger_that_a_test_makes_has_no_level_of_its_own_later() -> None:
    with logging_as_before():
        logging.getLogger("tests.another_new_logger").setLevel(logging.CRITICAL)
    assert logging.getLogger("tests.another_new_logger").level == logging.NOTSET


def test_each_test_leaves_the_logs_as_they_were(request: pytest.FixtureRequest) -> None:
    assert "logs_as_before" in request.fixturenames
