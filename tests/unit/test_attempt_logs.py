"""What code logs inside an attempt is recorded: bounded, redacted, by any thread, and only of that attempt."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any
from uuid import uuid4

import pytest
import structlog

from leasehold.settings import Settings
from leasehold.telemetry import attempt_logs, child_logs
from leasehold.telemetry.attempt_logs import Recorder
from leasehold.telemetry.emissions import Emissions
from leasehold.telemetry.logs import configure_logs, set_facts_of_lines


@pytest.fixture
def heard() -> Iterator[None]:
    """The handler stands at the root logger, beside those that are there already."""
    logger = logging.getLogger("shop")
    level = logger.level
    logger.setLevel(logging.INFO)
    with attempt_logs.installed():
        yield
    logger.setLevel(level)


def recorder(lines: int = 100, size: int = 100_000) -> Recorder:
    return Recorder(lines, size, threading.Lock())


def recorded(recorder: Recorder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recorder.take()[1]]


def messages(recorder: Recorder) -> list[str]:
    return [line["message"] for line in recorded(recorder)]


def test_a_line_of_the_context_is_recorded_and_no_other(heard: None) -> None:
    mine, others = recorder(), recorder()

    def attempt(own: Recorder, word: str) -> None:
        attempt_logs.record_in(own)
        logging.getLogger("shop").info("sold %s", word, extra={"price": 3, "buyer": {"a": 1}})

    copy_context().run(attempt, mine, "a hat")
    copy_context().run(attempt, others, "a shoe")
    logging.getLogger("shop").info("nobody's")
    (line,) = recorded(mine)
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "shop",
        "message": "sold a hat",
        "fields": {"price": 3, "buyer": "{'a': 1}"},
    }
    assert messages(others) == ["sold a shoe"]


def test_a_traceback_is_kept_and_secrets_are_not(heard: None) -> None:
    own = recorder()

    def attempt() -> None:
        attempt_logs.record_in(own)
        try:
            int("Bearer abcdefghijk")
        except ValueError:
            logging.getLogger("shop").exception("at postgresql://me:hunter2@db/x", extra={"key": "Bearer abcdefghijk"})

    copy_context().run(attempt)
    (line,) = recorded(own)
    assert line["traceback"].startswith("Traceback (most recent call last)")
    assert "Bearer [redacted]" in line["traceback"]
    assert line["message"] == "at postgresql://me:[redacted]@db/x"
    assert line["fields"] == {"key": "Bearer [redacted]"}


def test_text_that_postgresql_cannot_store_is_made_storable(heard: None) -> None:
    own = recorder()
    own.add("info", "a\x00b", "half \ud800 and \x00", fields={"\x00": "\x00", "big": 2**70, "none": float("nan")})
    (line,) = recorded(own)
    assert (line["logger"], line["message"]) == ("ab", "half ? and ")
    assert line["fields"] == {"": "", "big": str(2**70), "none": None}


@pytest.mark.parametrize(("lines", "size"), [(3, 100_000), (100, 400)])
def test_an_attempt_that_logs_too_much_is_cut_and_says_so(lines: int, size: int) -> None:
    own = recorder(lines, size)
    for number in range(50):
        own.add("info", "shop", f"line {number}")
    own.add_final("error", "it failed", trace="where")
    own.close()
    own.add("info", "shop", "too late")
    own.add_final("error", "too late")
    read = recorded(own)
    assert [line["message"] for line in read[:3]] == ["line 0", "line 1", "line 2"]
    assert read[-3]["message"].startswith("The log is cut here: ")
    assert read[-3]["fields"] == {"cut": True}
    assert (read[-2]["message"], read[-2]["traceback"]) == ("it failed", "where")
    assert read[-1]["message"] == f"Lines of this attempt that are not kept: {50 - (len(read) - 3)}."


def test_where_no_line_is_to_be_kept_none_is() -> None:
    own = recorder(0)
    own.add("info", "shop", "a line")
    own.add_final("error", "it failed")
    own.close()
    assert recorded(own) == []


def test_long_texts_lose_their_end_and_tracebacks_their_beginning() -> None:
    own = recorder(size=10_000_000)
    own.add("info", "shop", "x" * 100_000, fields={"f": "y" * 100_000}, trace="z" * 100_000 + "the end")
    (line,) = recorded(own)
    assert line["message"] == "x" * attempt_logs.MAX_MESSAGE + " [...]"
    assert line["fields"]["f"] == "y" * attempt_logs.MAX_VALUE + " [...]"
    assert line["traceback"].startswith("[...] zzz")
    assert line["traceback"].endswith("the end")


async def test_threads_that_carry_the_context_are_heard(heard: None) -> None:
    own = recorder()
    attempt_logs.record_in(own)
    try:
        await asyncio.to_thread(logging.getLogger("shop").info, "from a thread")
    finally:
        attempt_logs.record_in(None)
    assert messages(own) == ["from a thread"]


def test_many_threads_lose_no_line_while_lines_are_taken(heard: None) -> None:
    own = recorder(10_000, 10_000_000)
    firsts: list[int] = []
    own.on_first = lambda: firsts.append(1)

    def attempt(thread: int) -> None:
        for number in range(200):
            own.add("info", "shop", f"{thread}.{number}")

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    read: list[bytes] = []
    while any(thread.is_alive() for thread in threads):
        first, lines = own.take()
        assert first == len(read) + 1
        read += lines
    read += own.take()[1]
    assert len({json.loads(line)["message"] for line in read}) == 1600
    assert firsts


def test_what_a_speculation_logged_is_its_attempts_then() -> None:
    early, own = recorder(3), recorder(3)
    early.add("info", "shop", "before")
    early.hand_over(own)
    early.add("info", "shop", "after")
    assert messages(own) == ["before", "after"]
    assert messages(early) == []


def test_what_a_speculation_logs_into_a_log_that_is_cut_is_counted_and_marks_no_second_cut() -> None:
    early, own = recorder(3), recorder(1)
    early.hand_over(own)
    for message in ("kept", "cut", "dropped"):
        early.add("info", "shop", message)
    own.close()
    kept, mark, count = messages(own)
    assert (kept, "cut here" in mark, count.endswith("not kept: 2.")) == ("kept", True, True)


def test_a_speculation_that_outlives_its_attempt_adds_nothing_to_it() -> None:
    early, own = recorder(3), recorder(3)
    early.hand_over(own)
    own.close()
    early.add("info", "shop", "late")
    assert messages(own) == []


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_lines_of_structlog_are_recorded_with_their_fields_and_tracebacks(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    own = recorder()
    job_id, bound = uuid4(), {"customer": 7}
    no_fields: dict[str, str] = {}

    def attempt() -> None:
        attempt_logs.record_in(own)
        set_facts_of_lines({"job_id": job_id, "step": "sell", "trace_id": None})
        structlog.contextvars.bind_contextvars(worker_id="1", **bound)
        log = structlog.get_logger("shop")
        log.info("sold", hat=1, job_id=str(job_id))
        log.info("sold", step=3, worker_id="mine", trace_id="theirs")
        try:
            no_fields["gone"]
        except KeyError:
            log.exception("not sold")
        log.debug("below the level")

    try:
        configure_logs(Settings(log_format=log_format, _env_file=None))
        with attempt_logs.installed():
            copy_context().run(attempt)
    finally:
        structlog.reset_defaults()
        root.handlers = handlers
        root.setLevel(level)
    sold, with_own_words, failed = recorded(own)
    assert (sold["level"], sold["logger"], sold["message"]) == ("info", "shop", "sold")
    assert sold["fields"] == {"hat": 1} | bound
    assert with_own_words["fields"] == {"step": 3, "worker_id": "mine", "trace_id": "theirs"} | bound
    assert failed["fields"] == bound
    assert (failed["level"], failed["message"]) == ("error", "not sold")
    assert failed["traceback"].rstrip().endswith("KeyError: 'gone'")
    shown = capsys.readouterr().err
    assert "KeyError" in shown  # the process's own log has it, too


def test_a_field_may_have_a_name_that_the_platform_uses_too(heard: None) -> None:
    own = recorder()
    fields = {"step": "parse", "job_id": 7, "event": "signup", "level": 3, "timestamp": 1, "logger": "x", "stack": "y"}

    def attempt() -> None:
        attempt_logs.record_in(own)
        logging.getLogger("shop").info("done", extra=fields)

    copy_context().run(attempt)
    (line,) = recorded(own)
    assert (line["message"], line["fields"]) == ("done", fields)


def test_a_level_has_its_name_although_a_formatter_has_coloured_it(heard: None) -> None:
    own = recorder()

    class Coloured(logging.Handler):
        """Its formatter changes the record, which goes on to the handlers of the root logger."""

        def emit(self, record: logging.LogRecord) -> None:
            record.levelname = f"\x1b[32m{record.levelname}\x1b[0m"

    def attempt() -> None:
        attempt_logs.record_in(own)
        logging.getLogger("shop").info("done")

    coloured = Coloured()
    logging.getLogger("shop").addHandler(coloured)
    try:
        copy_context().run(attempt)
    finally:
        logging.getLogger("shop").removeHandler(coloured)
    assert recorded(own)[0]["level"] == "info"


def test_what_the_collector_finds_in_an_attempt_is_not_its(heard: None) -> None:
    """A forgotten task may be another tenant's: the garbage collector runs in any attempt."""
    own = recorder()

    def attempt() -> None:
        attempt_logs.record_in(own)
        logging.getLogger("asyncio").error("Task exception was never retrieved: secret of another tenant")
        logging.getLogger("asyncio.mine").error("of the attempt")

    copy_context().run(attempt)
    assert messages(own) == ["of the attempt"]


def test_the_lines_of_one_worker_are_heard_after_another_of_the_process_has_ended(heard: None) -> None:
    own = recorder()
    with attempt_logs.installed():
        pass

    def attempt() -> None:
        attempt_logs.record_in(own)
        logging.getLogger("shop").info("still here")

    copy_context().run(attempt)
    assert messages(own) == ["still here"]


def test_a_line_that_cannot_be_written_does_not_end_the_attempt(heard: None, monkeypatch: pytest.MonkeyPatch) -> None:
    own = recorder()
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def attempt() -> None:
        attempt_logs.record_in(own)
        logging.getLogger("shop").info("%d hats", "many")
        logging.getLogger("shop").info("goes on")

    copy_context().run(attempt)
    assert messages(own) == ["goes on"]


def test_a_thread_that_outlives_its_attempt_adds_nothing_to_it() -> None:
    own = recorder()
    woken: list[None] = []
    own.close()
    own.on_first = lambda: woken.append(None)
    own.add("info", "shop", "late")
    own.add_final("error", "late")
    assert (recorded(own), woken) == ([], [])


def test_the_fields_of_a_hostile_child_replace_nothing_of_the_line(heard: None) -> None:
    own = recorder()
    fields = {"getMessage": "x", "__class__": "x", "msg": "x", "levelno": 50, "price": 3}

    def attempt() -> None:
        attempt_logs.record_in(own)
        child_logs.log_line("shop", logging.ERROR, "from a child", trace="", child=7, fields=fields)

    copy_context().run(attempt)
    (line,) = recorded(own)
    assert (line["level"], line["message"], line["fields"]) == ("error", "from a child", {"child": 7, "price": 3})


def test_names_are_cut_too() -> None:
    own = recorder()
    own.add("info", "l" * 500, "x", fields={"f" * 500: 1} | {f"{number}": number for number in range(50)})
    (line,) = recorded(own)
    cut = " [...]"
    assert line["logger"] == "l" * attempt_logs.MAX_NAME + cut
    assert next(iter(line["fields"])) == "f" * attempt_logs.MAX_NAME + cut
    assert len(line["fields"]) == attempt_logs.MAX_FIELDS


def test_a_process_without_logs_of_its_own_still_sees_its_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with attempt_logs.installed():
            logging.getLogger("shop").warning("look here")
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err == "look here\n"


def test_chunks_are_json_without_nul_and_cut_at_their_bounds() -> None:
    emissions = Emissions(3, 10_000, threading.Lock())
    assert emissions.emit("a\x00b")
    assert emissions.emit({"literal": "\\u0000"})
    with pytest.raises(ValueError, match="NUL"):
        emissions.emit({"nul": "\x00"})
    with pytest.raises(TypeError):
        emissions.emit(object())
    assert emissions.emit(None)
    assert [emissions.emit("more"), emissions.emit("and more")] == [False, False]
    first, chunks = emissions.take()
    assert first == 1
    read = [json.loads(chunk) for chunk in chunks]
    assert read == [{"chunk": "ab"}, {"chunk": {"literal": "\\u0000"}}, {"chunk": None}, {"cut": True}]
    assert emissions.take() == (5, [])
    by_bytes = Emissions(100, 30, threading.Lock())
    assert [by_bytes.emit("x" * 10), by_bytes.emit("x" * 10)] == [True, False]
    by_bytes.close()
    assert not by_bytes.emit("late")
    assert len(by_bytes.take()[1]) == 2


def test_a_number_of_a_subclass_stays_a_number_and_loses_no_line() -> None:
    class Kilograms(float):
        """As numpy's float64 is one."""

    class Count(int):
        pass

    kept = recorder()
    kept.add("info", "shop", "weighed", fields={"kg": Kilograms(1.5), "count": Count(3), "infinite": float("inf")})
    assert recorded(kept)[0]["fields"] == {"kg": 1.5, "count": 3, "infinite": None}
