"""The program of `scripts/services`. It runs private PostgreSQL, RabbitMQ and S3 servers for a shell or one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

from leasehold.embedded.process import EmbeddedError, event_of_stop_signals
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.embedded.stack import EmbeddedStack

#: The program waits this many seconds for the end of its command after SIGTERM, and again after SIGKILL.
STOP_SECONDS = 10.0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/services",
        description="Run private PostgreSQL, RabbitMQ and S3 servers on free loopback ports. Without a command, print "
        "the environment variables with their addresses, and run until Ctrl-C. With a command, run it with these "
        "variables, and stop the servers when it ends.",
    )
    parser.add_argument("--no-postgres", action="store_true")
    parser.add_argument("--no-rabbitmq", action="store_true")
    parser.add_argument("--no-s3", action="store_true")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIRECTORY",
        help="keep the data in this directory; by default it is deleted at the end",
    )
    parser.add_argument("--not-durable", action="store_true", help="do not let PostgreSQL wait for the disk")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="run this with the variables set")
    return parser.parse_args(argv)


async def serve(options: argparse.Namespace) -> int:
    """Run the servers for a command, or until a signal. Returns the exit code of this program."""
    stack = EmbeddedStack(
        options.data,
        durable=not options.not_durable,
        postgres=not options.no_postgres,
        s3=not options.no_s3,
        rabbitmq=None if options.no_rabbitmq else await install_rabbitmq(),
    )
    # From now on a stop signal sets this event. The code below then ends, and `stack` stops the servers.
    stop_event = event_of_stop_signals()
    async with stack:
        if stop_event.is_set():  # a signal came while the servers started
            return 128 + signal.SIGINT
        if options.command:
            return await run_command(options.command, stack.environment, stop_event)
        for name, value in stack.environment.items():
            print(f"export {name}={shlex.quote(value)}", flush=True)  # noqa: T201 - the program's output
        print("Ready. Ctrl-C stops them.", file=sys.stderr)  # noqa: T201
        await stop_event.wait()
    return 0


async def run_command(command: list[str], environment: dict[str, str], stop_event: asyncio.Event) -> int:
    """Run a command to its end. Returns its exit code, or 128 + N if signal N ended it. After `stop_event` the command
    gets SIGTERM, and SIGKILL if it still runs after STOP_SECONDS. Raises EmbeddedError if the command cannot be started
    or cannot be ended.
    """
    try:
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | environment)
    except OSError as error:
        raise EmbeddedError(f"{command[0]} cannot be started: {error.strerror}") from error
    exit_task = asyncio.create_task(process.wait())
    stop_task = asyncio.create_task(stop_event.wait())
    await asyncio.wait({exit_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
    stop_task.cancel()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not exit_task.done():
            _send_signal(process, number)
            await asyncio.wait({exit_task}, timeout=STOP_SECONDS)
    if not exit_task.done():
        raise EmbeddedError(f"{command[0]} runs as another user, and did not end: end it yourself")
    code = exit_task.result()
    return code if code >= 0 else 128 - code


def _send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # A command such as sudo runs as another user. PermissionError: this user may not send signals to its processes.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        process.send_signal(number)


def main() -> int:
    try:
        return asyncio.run(serve(parse(sys.argv[1:])))
    except EmbeddedError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
