"""Tasks that run in a process of their own, or in the sandbox; the worker's processes import this module."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import structlog
from pydantic import BaseModel, ConfigDict

from leasehold import App, Permanent, Retry, current
from leasehold.app.current import NotInTask

app = App("children")
ONCE = Retry(times=0)


@app.task(process=True, retry=ONCE)
def add(a: int, b: int) -> list[int]:
    current().progress(50, "half")
    return [a + b, os.getpid(), current().number]


@app.task(process=True, retry=ONCE)
def talk(fails: bool) -> None:
    logging.getLogger("shop").info("in a process")
    current().log.info("to its own logger")
    current().emit("a chunk")
    if fails:
        raise KeyError("hats")


@app.task(process=True, retry=ONCE)
def talk_with_fields() -> None:
    fields = {
        "price": 3,
        "weight": float("nan"),
        "is_new": True,
        "buyer": {"a": 1},
        "odd": "\udcff\x00",
        "child": "mine",
    }
    logging.getLogger("shop").info("sold", extra=fields)


@app.task(process=True, retry=ONCE)
def talk_by_structlog() -> None:
    log = structlog.get_logger("shop")
    log.info("sold", hats=2)
    log.debug("below the level")
    no_hats: dict[str, int] = {}
    try:
        no_hats["hats"]
    except KeyError:
        log.exception("not sold")


_left_behind = threading.Event()
_has_talked = threading.Event()


@app.task(process=True, retry=ONCE)
def leave_a_thread(secret: str) -> int:
    """Leaves a thread that talks, also by a thread of its own, once the next call has begun."""
    attempt = current()

    def say(word: str) -> None:
        logging.getLogger("shop").info("%s %s", word, secret)
        attempt.emit(secret)
        attempt.progress(99, secret)

    def talk() -> None:
        _left_behind.wait()
        say("thread")
        thread = threading.Thread(target=say, args=("its thread",))
        thread.start()
        thread.join()
        _has_talked.set()

    threading.Thread(target=talk, daemon=True).start()
    return os.getpid()


@app.task(process=True, retry=ONCE)
def talk_beside_the_thread() -> int:
    _left_behind.set()
    assert _has_talked.wait(60)
    thread = threading.Thread(target=logging.getLogger("shop").info, args=("of this call",))
    thread.start()
    thread.join()
    return os.getpid()


_pool = ThreadPoolExecutor(1)
_call_is_over = threading.Event()


@app.task(process=True, retry=ONCE)
def leave_work_in_a_pool() -> int:
    """The module's pool has one thread, which this call starts."""

    def talk_late() -> None:
        _call_is_over.wait(60)
        logging.getLogger("shop").info("secret")

    _pool.submit(logging.getLogger("shop").info, "first").result()
    _pool.submit(talk_late)
    return os.getpid()


@app.task(process=True, retry=ONCE)
def talk_in_the_pool() -> int:
    _call_is_over.set()
    list(_pool.map(logging.getLogger("shop").info, ["second", "third"]))
    return os.getpid()


@app.task(isolated=True, retry=ONCE)
def talk_in_the_sandbox() -> None:
    fields = {"price": 3, "buyer": {"a": 1}, "__class__": "odd", "long": "x" * 5000}
    logging.getLogger("shop").info("in the sandbox", extra=fields | {f"{number}": number for number in range(50)})
    current().emit("a chunk")


@app.task(process=True, retry=ONCE)
def large(size: int) -> str:
    return "x" * size


@app.task(process=True, retry=Retry(times=1, delay=timedelta(0), never=(KeyError,)))
def fail(kind: str) -> None:
    if kind == "permanent":
        raise Permanent("no_such_thing", "never was")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "killed by a signal without a name":
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
    if kind == "exits":
        sys.exit(3)
    if kind == "odd file name":
        logging.getLogger("shop").warning("no file \udcff")
        raise FileNotFoundError("no file \udcff")
    if kind == "no text":
        raise Speechless
    raise {"key": KeyError, "value": ValueError}[kind]("it")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError


@app.task(process=True, retry=ONCE)
def replace_directory() -> str:
    """It leaves a file where its directory was, which cannot be deleted as a directory."""
    current().directory.rmdir()
    current().directory.write_text("")
    return "done"


@app.task(process=True, retry=ONCE)
def die_with_files(note: str) -> None:
    """As at its time limit, or when memory runs out. `note`: gets the path of the directory."""
    (current().directory / "large").write_text("x")
    Path(note).write_text(str(current().directory))
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(process=True, retry=ONCE, timeout=timedelta(seconds=2))
def hang_with_a_child(path: str) -> None:
    """Starts a program that would go on, and never returns."""
    program = f"import time,pathlib\nwhile True: pathlib.Path({path!r}).write_text(str(time.time())); time.sleep(0.05)"
    subprocess.Popen([sys.executable, "-c", program])
    time.sleep(600)


@app.task(process=True, retry=ONCE)
def stop_when_asked() -> None:
    current().progress(1, "looping")
    while True:
        current().checkpoint()
        time.sleep(0.02)


class Event(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    key: UUID


@app.task(process=True, retry=ONCE)
def event_in_a_process(event: Event) -> str:
    return f"{event.at.isoformat()} {event.key.version}"


@app.task(isolated=True, retry=ONCE)
def event_in_the_sandbox(event: Event) -> str:
    return f"{event.at.isoformat()} {event.key.version}"


@app.task(process=True, retry=ONCE)
def report_oddly() -> str:
    """0/0 of a function's arithmetic, and half of a character."""
    current().progress(float("nan"))
    current().progress(1, "half: \ud83d")
    return "done"


@app.task(isolated=True, retry=ONCE)
def shout(text: str) -> str:
    current().progress(10)
    return text.upper()


@app.task(isolated=True, retry=ONCE)
def shout_much(size: int) -> str:
    return "X" * size


@app.task(isolated=True, retry=ONCE)
def ask_in_the_sandbox() -> list[str]:
    current().log.info("to its own logger")
    answers = [str(current().state)]
    for member in ("run_id", "tenant", "number"):
        try:
            getattr(current(), member)
        except NotInTask as error:
            answers.append(str(error))
    return answers
