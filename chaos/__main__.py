"""`scripts/chaos [--seed S] [--runs N] [--mutate NAME] ...`: break an installation, judge it, exit 1 on a violation."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import structlog
from rich.console import Console

from chaos import record, report
from chaos.catalogue import BY_NAME
from chaos.mutations import MUTATIONS
from chaos.plan import DIRECTED, SECONDS, Plan, make_plan, plan_of
from chaos.run import Report, run
from chaos.servers import Servers
from leasehold.embedded.process import EmbeddedError

_ALL = "all"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Break a private installation by a seeded plan, and prove from its history that nothing was lost.",
    )
    parser.add_argument(
        "--seed", type=int, help="of the first run; each next run has the next number (default: a random one)"
    )
    parser.add_argument("--runs", type=int, help="how many (default: 1; with --record: 100, less those that are there)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of load and faults in each run (%(default)s)")
    parser.add_argument("--faults", type=int, default=5, help="in each run, at least 3 (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append one line for each run to this file, with all evidence"
    )
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=record.RECORD,
        metavar="FILE",
        help="append a short line for each run to this file, and write the table of docs/explanation/chaos.md (default:"
        " %(const)s). Its plans have more faults than other plans. Seeds that the file already has at this commit are"
        " left out. So a stopped record can be continued, and two processes with different seeds can share the work",
    )
    parser.add_argument(
        "--mutate", choices=[*sorted(MUTATIONS), _ALL], help="run without this guard: the checker must object"
    )
    parser.add_argument("--directed", choices=sorted(DIRECTED), help="a mutant's plan, without the mutation")
    parser.add_argument(
        "--fault", choices=sorted(BY_NAME), metavar="NAME", help="only this fault, by its name in the catalogue"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="copy logs and journals of red runs to this directory"
    )
    parser.add_argument(
        "--figures",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only print a table of the runs in these files of --json: a row for each fault that was alone in its run",
    )
    parser.add_argument("--no-broker", action="store_true", help="the `postgres` broker, without RabbitMQ")
    parser.add_argument("--table", action="store_true", help="only write the table of --record anew")
    options = parser.parse_args(arguments)
    if options.faults < 3:  # noqa: PLR2004 - as the help says
        parser.error("--faults: at least 3")
    return options


def plans(options: argparse.Namespace, abilities: Collection[str]) -> list[tuple[Plan, str]]:
    """The plans that the options ask for, each with the name of its mutation, or "".

    `abilities`: what this machine can do of what faults need (`Servers.abilities`).
    """
    if options.mutate:
        names = sorted(MUTATIONS) if options.mutate == _ALL else [options.mutate]
        return [(DIRECTED[name], name) for name in names]
    if options.directed:
        return [(DIRECTED[options.directed], "")]
    if options.fault:
        return [
            (plan_of(options.fault, (options.seed or 0) + nth, seconds=options.seconds), "")
            for nth in range(options.runs or 1)
        ]
    if options.record:
        range_options = {"first": options.seed, "runs": options.runs}
        given_options = {name: value for name, value in range_options.items() if value is not None}
        seeds = record.seeds(record.read(options.record), report.commit(), **given_options)
        return [(record.plan_of(seed, abilities), "") for seed in seeds]
    first_seed = options.seed if options.seed is not None else random.randrange(1_000_000)  # noqa: S311 - it is printed
    return [
        (make_plan(first_seed + nth, seconds=options.seconds, faults=options.faults, abilities=abilities), "")
        for nth in range(options.runs or 1)
    ]


async def carry_out(options: argparse.Namespace, console: Console, reports: list[Report]) -> None:
    """Run all plans, and append the report of each run to `reports`.

    With --record an error in a run makes that run a failure, and new servers are started for the next run.
    """
    plans_left: list[tuple[Plan, str]] | None = None
    while plans_left is None or plans_left:
        async with Servers(broker=not options.no_broker) as servers:
            plans_left = plans(options, servers.abilities) if plans_left is None else plans_left
            while plans_left:
                plan, mutate = plans_left.pop(0)
                try:
                    result = await run(servers, plan, mutate=mutate, keep=options.keep)
                except Exception as error:
                    if not options.record:
                        raise
                    result = Report(plan, mutate, failure=f"{type(error).__name__}: {error}"[:200])
                report.show(result, console)
                if options.json:
                    report.append(result, options.json)
                if options.record and not mutate:
                    record.append(result, options.record)
                reports.append(result)
                if result.failure:
                    break


async def until_stopped(options: argparse.Namespace, console: Console, reports: list[Report]) -> bool:
    """Like `carry_out`, but SIGTERM and Ctrl-C end it: the reports of the finished runs are kept. Returns whether a
    signal ended it.
    """
    task = asyncio.create_task(carry_out(options, console, reports))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return task.cancelled()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if options.figures:
        console.print(report.table_by_fault(report.read(options.figures)), markup=False)
        return 0
    if options.table:
        record.write_page(record.read())
        return 0
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    for library in ("aiormq", "aio_pika", "aiohttp"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    reports: list[Report] = []
    try:
        was_stopped = asyncio.run(until_stopped(options, console, reports))
    except EmbeddedError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    report.sum_up(reports, console)
    if options.record == record.RECORD:
        record.write_page(record.read())
    if was_stopped:  # the runs that are missing have proved nothing
        console.print("stopped by a signal before the last run had ended")
        return 1
    return 0 if all(result.good for result in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
