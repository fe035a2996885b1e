"""`python -m mutants.warm FILE`, in a copy of the checkout: judges one mutant after another, each in a fork of itself.

The process has loaded pytest, our modules and the tests of the files that FILE lists. Each fork puts the mutant into
what is loaded (swapping.py); a mutant for which that is not possible gets the answer `cannot`, with the reason. As the
nursery, the process reads orders as lines of JSON, and answers each order with a line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO, Any

import pytest

from mutants import nursery
from mutants.judging import Items, Judging, invalid_statement
from mutants.places import ROOT, module_of
from mutants.swapping import Loaded

_FOLDERS = ("leasehold", "tests")


class Warm:
    """A pytest plugin that carries out orders in place of pytest's own loop over all tests."""

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders, self._answers = orders, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        loaded, items = Loaded(ROOT, _FOLDERS), Items(session.items)
        asyncio.run(_read_descriptions_of_s3())
        gc.collect()
        gc.freeze()  # a collection in a fork would go through all of it, and copy its pages
        self._answer({"ready": len(session.items)})
        for line in self._orders:
            order = json.loads(line)
            self._answer(nursery.judge(order, lambda order: _test(session, loaded, items, order)))
        return True

    def _answer(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


async def _read_descriptions_of_s3() -> None:
    """Make a client of the platform and one of the tests: each fork would read botocore's descriptions again, which
    takes a quarter of its time.
    """
    # pytest must be the first to import our modules, because it rewrites their asserts.
    from leasehold.settings import Settings  # noqa: PLC0415 - as above
    from leasehold.storage.s3 import open_client  # noqa: PLC0415 - as above
    from tests.support.bucket import Bucket  # noqa: PLC0415 - as above

    nowhere = "http://127.0.0.1:9"
    async with open_client(Settings(_env_file=None), nowhere), Bucket(nowhere, "key", "secret", "bucket").client():
        pass


def _test(session: pytest.Session, loaded: Loaded, collected: Items, order: dict[str, Any]) -> int:
    """In the fork: put the mutant in, and run the tests of the order up to the first failure."""
    try:
        loaded.swap(module_of(order["path"]), order["before"], order["text"])
    except Exception as error:  # noqa: BLE001 - of any kind, from a mutant of code that runs while modules are loaded
        nursery.RESULT.write_text(json.dumps({"cannot": repr(error)}))
        return 0
    if refusal := invalid_statement(order["statements"], order["database"]):
        nursery.RESULT.write_text(json.dumps({"invalid": refusal}))
        return 0
    judging = Judging(order["tests"], order["limits"], nursery.RESULT)
    items = judging.chosen(collected)
    session.config.pluginmanager.register(judging)
    for item, following in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if judging.has_noticed:
            break
    try:
        session._setupstate.teardown_exact(None)  # noqa: SLF001 - as pytest's own runner; there is no public way
    except Exception:  # noqa: BLE001 - of a test that has noticed the mutant already; the others have ended theirs
        traceback.print_exc()
    return int(judging.has_noticed)


def main() -> None:
    files = json.loads(Path(sys.argv[1]).read_text())
    nursery.adopt_orphans()
    # pytest puts files of its own in the place of these three.
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    log = os.open(ROOT / "warm.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit(pytest.main([*nursery.OPTIONS, *files], plugins=[Warm(orders, answers)]))


if __name__ == "__main__":
    main()
