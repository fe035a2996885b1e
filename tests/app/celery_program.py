"""What Celery's documentation does with its example. As a program it runs over Celery, and takes the broker's URL."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

SECONDS = 60.0


def first_steps(tasks: Any) -> None:
    result = tasks.add.delay(4, 4)
    assert result.get(timeout=SECONDS) == 8
    assert result.ready()
    assert (result.status, result.result, result.traceback) == ("SUCCESS", 8, None)
    failing = tasks.add.delay(4, "4")
    assert "unsupported operand" in str(failing.get(propagate=False, timeout=SECONDS))
    assert failing.state == "FAILURE"
    assert "TypeError" in failing.traceback


if __name__ == "__main__":
    over_celery = import_module("tests.app.celery_first_steps")
    over_celery.app.conf.broker_url = sys.argv[1]
    first_steps(over_celery)
