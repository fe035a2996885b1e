"""`scripts/chaos [--seed S] [--runs N] [--mutate NAME] ...`: break an installation, judge it, exit 1 on a violation."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import structlog
from rich.console import Console

from chaos import record, report
from chaos.catalogue import BY_NAME
from chaos.mutations import MUTATIONS
from chaos.plan import DIRECTED, Plan, make_plan, plan_of
from chaos.run import Report, run
from chaos.servers import Servers
from leasehold.embedded.process import EmbeddedError

_ALL = "all"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Break a private installation by a seeded plan, and prove from its history that nothing was lost.",
    )
    parser.add_argument("--seed", type=int, help="of the first run; the next runs count up (default: a random one)")
    parser.add_argument("--runs", type=int, default=1, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of load and faults a run (%(default)s)")
    parser.add_argument("--faults", type=int, default=5, help="a run, at least 3 (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line a run there, with all evidence")
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=record.RECORD,
        metavar="FILE",
        help="append a short line a run there, and write the table of docs/explanation/chaos.md (default: %(const)s)",
    )
    parser.add_argument("--mutate", choices=[*sorted(MUTATIONS), _ALL], help="run without a guard: must be violated")
    parser.add_argument("--directed", choices=sorted(DIRECTED), help="a mutant's plan, without the mutation")
    parser.add_argument(
        "--fault", choices=sorted(BY_NAME), metavar="NAME", help="this one alone, as the catalogue names it"
    )
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep logs and journals of violated runs there")
    parser.add_argument("--no-broker", action="store_true", help="the `postgres` broker, without RabbitMQ")
    parser.add_argument("--table", action="store_true", help="only write that table anew, from the record")
    options = parser.parse_args(arguments)
    if options.faults < 3:  # noqa: PLR2004 - as the help says
        parser.error("--faults: at least 3")
    return options


def plans(options: argparse.Namespace, able: Collection[str]) -> list[tuple[Plan, str]]:
    """What to run, each with its mutation or ""."""
    if options.mutate:
        names = sorted(MUTATIONS) if options.mutate == _ALL else [options.mutate]
        return [(DIRECTED[name], name) for name in names]
    if options.directed:
        return [(DIRECTED[options.directed], "")]
    if options.fault:
        return [
            (plan_of(options.fault, (options.seed or 0) + nth, seconds=options.seconds), "")
            for nth in range(options.runs)
        ]
    first = options.seed if options.seed is not None else random.randrange(1_000_000)  # noqa: S311 - it is printed
    return [
        (make_plan(first + nth, seconds=options.seconds, faults=options.faults, able=able), "")
        for nth in range(options.runs)
    ]


async def carry_out(options: argparse.Namespace, console: Console) -> list[Report]:
    reports = []
    async with Servers(broker=not options.no_broker) as servers:
        for plan, mutate in plans(options, servers.able):
            result = await run(servers, plan, mutate=mutate, keep=options.keep)
            report.show(result, console)
            if options.json:
                report.append(result, options.json)
            if options.record and not mutate:
                record.append(result, options.record)
            reports.append(result)
    return reports


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if options.table:
        record.write_page(record.read())
        return 0
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    for noisy in ("aiormq", "aio_pika", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    try:
        reports = asyncio.run(carry_out(options, console))
    except EmbeddedError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    report.sum_up(reports, console)
    if options.record == record.RECORD:
        record.write_page(record.read())
    return 0 if all(result.good for result in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
