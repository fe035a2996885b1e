"""The parts that run in the fork of a mutant: the pytest plugin for its tests, and the check of its statements."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import asyncpg
import pytest

#: PostgreSQL's errors for a mutant that is not SQL, or that names a column that does not exist. It proves nothing.
_NO_STATEMENT = asyncpg.exceptions.SyntaxOrAccessError


class Items:
    """The tests that pytest has collected, by their ids and by their functions."""

    def __init__(self, items: Iterable[pytest.Item]) -> None:
        self._by_id = {item.nodeid: item for item in items}
        self._by_function: dict[str, list[pytest.Item]] = defaultdict(list)
        for test, item in self._by_id.items():
            self._by_function[_function_of(test)].append(item)

    def of(self, tests: Iterable[str]) -> dict[pytest.Item, str]:
        """The items that run these tests, in this order, each with its test. A test may have other parameters since the
        coverage was measured: then its function judges with all of them.
        """
        found: dict[pytest.Item, str] = {}
        for test in tests:
            item = self._by_id.get(test)
            for one in [item] if item is not None else self._by_function.get(_function_of(test), ()):
                found.setdefault(one, test)
        return found


class Judging:
    """Runs `tests` in this order, each within its limit of seconds, and writes the file `result` after each.

    Fields of the result: `ran`: how many tests ran. `by`: the test that failed. `why`: its error, cut. `timeout`:
    whether it exceeded its limit. `invalid`: the error, if PostgreSQL refused a statement because it is not SQL.
    """

    def __init__(self, tests: list[str], limits: list[float], result: Path) -> None:
        self._tests = tests
        self._limits = dict(zip(tests, limits, strict=True))
        self._file = result
        self._result: dict[str, object] = {"ran": 0}

    @property
    def has_noticed(self) -> bool:
        """Whether a test has failed."""
        return "by" in self._result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = self.chosen(Items(items))

    def chosen(self, items: Items) -> list[pytest.Item]:
        """The items of the tests, each with its limit."""
        chosen = items.of(self._tests)
        for item, test in chosen.items():
            item.add_marker(pytest.mark.timeout(self._limits[test]), append=False)
        self._result["collected"] = len(chosen)
        self._write()
        return list(chosen)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._result |= {"by": report.nodeid, "why": report.longreprtext[-400:]}
            self._write()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call":
            self._result["ran"] = int(str(self._result["ran"])) + 1
        if call.excinfo is not None and report.failed and not self.has_noticed:
            error = call.excinfo.value
            is_invalid = isinstance(error, _NO_STATEMENT) and not isinstance(error, asyncpg.InsufficientPrivilegeError)
            self._result |= {
                "by": item.nodeid,
                "why": f"{type(error).__name__}: {error}"[:400],
                "timeout": "Timeout (>" in str(error),
                **({"invalid": str(error)[:200]} if is_invalid else {}),
            }
        self._write()
        return report

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._result))


def _function_of(test: str) -> str:
    return test.partition("[")[0]


def invalid_statement(digests: dict[str, str], database: str) -> str | None:
    """PostgreSQL's error for a statement that the mutant changed; None: PostgreSQL prepares all of them.

    `digests`: the digests of all statements without a mutant, by `module:NAME`.
    """
    changed = []
    for place, digest in digests.items():
        module, _, name = place.partition(":")
        text = vars(importlib.import_module(module)).get(name)
        if isinstance(text, str) and digest_of(text) != digest:
            changed.append(text)
    return asyncio.run(_refusal(changed, database)) if changed else None


async def _refusal(texts: list[str], database: str) -> str | None:
    connection = await asyncpg.connect(database)
    try:
        for text in texts:
            try:
                await connection.prepare(text)
            except _NO_STATEMENT as error:
                return str(error)
    finally:
        await connection.close()
    return None


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
