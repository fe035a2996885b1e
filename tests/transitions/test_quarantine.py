"""A unit that fails is set aside for longer each time, in its own duty; what is around it goes on, and an outage is no
fault of any unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import pytest
from structlog.testing import capture_logs

from leasehold.telemetry.duties import STUCK
from leasehold.transitions import quarantine
from tests.factories import Rows
from tests.security.poison import set_aside


async def fail(rows: Rows, unit: str = "unit", duty: str = "duty") -> tuple[int, float]:
    """The unit's failures in a row, and for how many seconds it is set aside."""
    failures = await quarantine.set_aside(rows.connection, duty, unit, ValueError("broken"))
    pause = await rows.connection.fetchval(
        "SELECT retry_at - failed_at FROM quarantine WHERE duty = $1 AND unit = $2", duty, unit
    )
    return failures, pause.total_seconds()


async def let_pass_since_the_retry(rows: Rows, unit: str, time: timedelta) -> None:
    await rows.connection.execute(
        "UPDATE quarantine SET retry_at = clock_timestamp() - $2::interval WHERE unit = $1", unit, time
    )


async def test_a_unit_is_set_aside_for_longer_each_time_up_to_an_hour_and_said_to_be_stuck_once(rows: Rows) -> None:
    before = STUCK.labels("duty")._value.get()
    with capture_logs() as lines:
        assert [await fail(rows) for _ in range(8)] == [
            (1, 5), (2, 15), (3, 60), (4, 300), (5, 900), (6, 3600), (7, 3600), (8, 3600)
        ]  # fmt: skip
    assert STUCK.labels("duty")._value.get() == before + 1
    assert [(line["log_level"], line["failures"]) for line in lines] == [("warning", 1), ("error", 5)]


async def test_a_failure_long_after_the_last_retry_counts_as_the_first(rows: Rows) -> None:
    """Ten minutes. The other unit failed again within that time."""
    for unit in ("long ago", "lately"):
        assert [(await fail(rows, unit))[0] for _ in range(3)] == [1, 2, 3]
    await let_pass_since_the_retry(rows, "long ago", timedelta(minutes=10, seconds=30))
    await let_pass_since_the_retry(rows, "lately", timedelta(minutes=9))
    assert [await fail(rows, unit) for unit in ("long ago", "lately")] == [(1, 5), (4, 300)]


async def test_a_unit_that_has_not_failed_again_is_forgotten_after_twice_that_time(rows: Rows) -> None:
    for unit, minutes in (("long ago", 21), ("lately", 19)):
        await fail(rows, unit)
        await let_pass_since_the_retry(rows, unit, timedelta(minutes=minutes))
    assert not await quarantine.forget(rows.connection)
    assert await set_aside(rows.connection, "duty") == {"lately": 1}


async def test_a_unit_is_left_out_by_its_own_duty_until_its_retry(rows: Rows) -> None:
    for unit, duty in (("aside", "duty"), ("due again", "duty"), ("aside elsewhere", "other")):
        await fail(rows, unit, duty)
    await let_pass_since_the_retry(rows, "due again", timedelta(0))
    taken = await rows.connection.fetch(
        f"SELECT unit FROM unnest($1::text[]) AS unit WHERE {quarantine.not_in('duty', 'unit', 'text')}",
        ["aside", "due again", "aside elsewhere", "never failed"],
    )
    assert [row["unit"] for row in taken] == ["due again", "aside elsewhere", "never failed"]


async def test_a_unit_that_a_person_has_changed_is_released_alone(rows: Rows) -> None:
    for unit, duty in (("unit", "duty"), ("unit", "other"), ("another", "duty")):
        await fail(rows, unit, duty)
    await quarantine.release(rows.connection, "duty", "unit")
    assert await set_aside(rows.connection, "duty") == {"another": 1}
    assert await set_aside(rows.connection, "other") == {"unit": 1}
    assert await fail(rows) == (1, 5)


async def test_an_error_means_an_outage_only_if_the_database_cannot_be_reached(database_url: str) -> None:
    """A statement that took too long may be the fault of its unit."""
    connection = await asyncpg.connect(database_url)
    faults = (ValueError(), TimeoutError(), asyncpg.QueryCanceledError(), asyncpg.LockNotAvailableError())
    assert [quarantine.is_away(connection, error) for error in faults] == [False] * 4
    assert quarantine.is_away(connection, ConnectionResetError())
    await connection.close()
    assert quarantine.is_away(connection, ValueError())


async def test_an_outage_ends_the_turn_and_sets_no_unit_aside(rows: Rows) -> None:
    tried: list[Sequence[str]] = []

    async def lose_the_connection(units: Sequence[str] = ("alone",)) -> Sequence[str]:
        tried.append(units)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await quarantine.run_unit(rows.connection, "duty", "alone", lose_the_connection)
    with pytest.raises(ConnectionResetError):
        await quarantine.run_known_units(rows.connection, "duty", ["a", "b"], lose_the_connection)
    assert tried == [("alone",), ["a", "b"]]
    assert await set_aside(rows.connection, "duty") == {}


async def test_who_asks_hears_of_each_failure_and_how_many_there_were_in_a_row(rows: Rows) -> None:
    """In the transaction that sets the unit aside: what it writes is committed with the row."""
    heard: list[tuple[str, int]] = []

    async def work() -> str:
        raise ValueError("broken")

    async def on_failure(error: Exception, failures: int) -> None:
        assert rows.connection.is_in_transaction()
        heard.append((str(error), failures))

    for _ in range(2):
        assert await quarantine.run_unit(rows.connection, "duty", "unit", work, on_failure) is None
    assert heard == [("broken", 1), ("broken", 2)]
    assert await set_aside(rows.connection, "duty") == {"unit": 2}


async def test_a_duty_that_cannot_find_its_units_fails_itself(rows: Rows) -> None:
    async def take(_unit: object) -> Sequence[str]:
        raise KeyError("a release of tomorrow")

    async def work(_units: Sequence[str]) -> Sequence[str]:
        raise AssertionError

    with pytest.raises(KeyError):
        await quarantine.run_units(rows.connection, "duty", take, work)
