"""Lists the files to mutate: those with guards in SQL, and those with guards in Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlglot.errors import TokenError

from mutants import literals, python, sql
from mutants.mutant import Change, Mutant, named
from mutants.source import Source

ROOT = Path(__file__).parent.parent

#: Files whose SQL is mutated.
STATEMENTS = (
    "leasehold/transitions/**/*.py",
    "leasehold/limits/*.py",
    "leasehold/broker/*.py",
    "leasehold/db/idempotency.py",
    "leasehold/db/artifacts.py",
    "leasehold/db/event_reads.py",
    "leasehold/db/run_reads.py",
    "leasehold/db/history.py",
    "leasehold/schedules/*.py",
    "leasehold/security/credentials.py",
    "worker/attempts/*.py",
    "api/runs/*.py",
    "api/fleet/*.py",
)
#: Files whose Python is mutated. Comments name the guards that they have.
GUARDS = (
    "worker/leases/*.py",  # the trust window, settling, the heartbeat
    "worker/attempts/failures.py",  # attempt limits and retries
    "worker/attempts/runner.py",  # the order of claim, run, settle
    "worker/attempts/publishing.py",  # adoption of outputs
    "worker/attempts/speculation.py",
    "worker/claiming/slot_pool.py",  # the order of commit and ACK
    "worker/claiming/hints.py",
    "worker/claiming/shares.py",
    "worker/maintenance/relay.py",
    "worker/maintenance/takeover.py",
    "leasehold/domain/backoff.py",
    "leasehold/domain/lease.py",
    "leasehold/domain/missing_code.py",
    "leasehold/transitions/**/*.py",
    "leasehold/limits/*.py",
    "leasehold/db/idempotency.py",
    "leasehold/db/batcher.py",
    "leasehold/broker/amqp/confirms.py",
    "leasehold/broker/amqp/acks.py",
    "leasehold/broker/amqp/deliveries.py",
    "leasehold/broker/outbox.py",
    "leasehold/storage/store.py",  # create-only and If-Match
    "leasehold/storage/streaming.py",
    "leasehold/storage/multipart.py",
    "leasehold/security/*.py",  # SSRF's ranges, keys, signatures
    "leasehold/pipelines/webhooks/*.py",  # signing and disabling
    "leasehold/schedules/firing.py",
    "api/auth/*.py",
    "api/http/idempotent.py",
    "api/http/etags.py",
    "api/runs/external.py",
    "api/runs/webhooks.py",
)
#: Files without guards: they print statements for people.
LEFT_OUT = ("leasehold/transitions/statements.py",)
#: Files of which only the scopes that routes require are mutated.
ROUTES = ("api/**/*.py",)


def all_files(root: Path = ROOT) -> set[str]:
    return files(root, (*STATEMENTS, *GUARDS, *ROUTES))


def mutants(root: Path = ROOT, only: str = "") -> list[Mutant]:
    """Every mutant of the files whose path begins with `only`, sorted by file and place."""
    all_mutants: list[Mutant] = []
    statements, guards, routes = files(root, STATEMENTS), files(root, GUARDS), files(root, ROUTES)
    for path in sorted(statements | guards | routes):
        if not path.startswith(only):
            continue
        source = Source(root, path)
        changes: list[Change] = []
        if path in statements:
            changes += _in_sql(source)
        if path in guards or path in routes:
            scopes = (change for change in python.changes(source) if path in guards or change.kind == "another scope")
            changes += scopes
        lines = ((source.scope(source.text.count("\n", 0, change.start) + 1), change) for change in changes)
        all_mutants += named(path, source.text, lines)
    return all_mutants


def files(root: Path, patterns: tuple[str, ...]) -> set[str]:
    """The files that match a pattern. Raises LookupError if a pattern matches no file, as after a rename."""
    by_pattern = {
        pattern: {str(path.relative_to(root)) for path in root.glob(pattern)} - set(LEFT_OUT) for pattern in patterns
    }
    if empty := [pattern for pattern, paths in by_pattern.items() if not paths]:
        raise LookupError(f"nothing to mutate: no file matches {empty}")
    return set().union(*by_pattern.values())


def module_of(path: str) -> str:
    """The name by which the file is imported. Folders outside of `leasehold/` are links in the package."""
    parts = Path(path).with_suffix("").parts
    parts = parts if parts[0] == "leasehold" else ("leasehold", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _in_sql(source: Source) -> Iterator[Change]:
    for piece in literals.pieces(source):
        try:
            changes = sql.changes(piece.text)
        except TokenError as error:
            raise ValueError(f"{source.path}:{piece.node.lineno} is no SQL: {error}") from error
        yield from map(piece.placed, changes)
