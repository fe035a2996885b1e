"""Renders the statements of pending revisions (migrations) as alembic would run them, for plan.py. This module runs no
statement.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import Script, ScriptDirectory
from sqlalchemy.dialects.postgresql.asyncpg import dialect

import leasehold
from leasehold.db.upgrading.index_builds import INDEXES_OPTION

#: After these words, a revision's docstring says what the revision means for older code that still runs.
_MAY_RUN = "May run before the new code:"
#: The statements with which alembic's output begins and ends a transaction.
_BEGIN, _COMMIT = "BEGIN", "COMMIT"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A revision and its statements. `transactions`: the statements, grouped by transaction. A statement that runs
    outside a transaction is a group of its own. `beside_old_code`: what the revision means for older code that still
    runs, from the revision's docstring.
    """

    revision: str
    title: str
    beside_old_code: str
    transactions: tuple[tuple[str, ...], ...]


class _Statements(StringIO):
    """Collects the statements that alembic writes. Alembic calls `write` once for each statement."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def write(self, statement: str) -> int:
        self.all.append(statement.strip().removesuffix(";"))
        return len(statement)


def config_of(versions: Path | None) -> Config:
    """Alembic's configuration. `versions`: the folder of a schema's revisions; None: the platform's schema."""
    config = Config()
    config.set_main_option("script_location", os.fspath(Path(leasehold.__file__).parent / "migrations"))
    if versions is not None:
        config.set_main_option("version_locations", os.fspath(versions).replace("%", "%%"))
        config.set_main_option("path_separator", "newline")
    return config


def passed_revision(current: str, target: str) -> str | None:
    """The revision that `target` names, if it is older than the schema's revision `current`. Returns None if `target`
    is not older, or if this code does not know `current`, because a newer release has migrated the database.

    Raises alembic's error for an unknown `target`.
    """
    script = ScriptDirectory.from_config(config_of(None))
    # A target such as `+1` counts from the current revision on, so it is not older.
    if target.startswith("+") or current not in {known.revision for known in script.walk_revisions()}:
        return None
    target_revision = script.get_revision(target)
    older_revisions = {known.revision for known in script.iterate_revisions(current, "base")} - {current}
    return target_revision.revision if target_revision.revision in older_revisions else None


def render(
    current: str | None, target: str = "head", *, versions: Path | None = None, indexes: Mapping[str, bool]
) -> Iterator[Rendered]:
    """The revisions after `current` (None: all revisions) up to `target`, in their order.

    `versions`: as for `config_of`. `indexes`: the name of each index of the database -> whether the index is valid.
    Raises alembic's CommandError for an unknown revision.
    """
    scripts = ScriptDirectory.from_config(config_of(versions))
    pending = scripts.iterate_revisions(target, current or "base")
    for script in reversed(list(pending)):
        yield _render(script, indexes)


def _render(script: Script, indexes: Mapping[str, bool]) -> Rendered:
    statements = _Statements()
    options = {"as_sql": True, "output_buffer": statements, "transaction_per_migration": True, INDEXES_OPTION: indexes}
    context = MigrationContext.configure(dialect=dialect(), opts=options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    with Operations.context(context):
        script.module.upgrade()
    notes = " ".join(script.longdoc.split())
    beside_old_code = notes.partition(_MAY_RUN)[2].strip()
    return Rendered(script.revision, script.doc, beside_old_code, tuple(_transactions(statements.all)))


def _transactions(statements: list[str]) -> Iterator[tuple[str, ...]]:
    """Group the statements by transaction. A statement after a COMMIT, and before the next BEGIN, is a group of its
    own.
    """
    transaction: list[str] = []
    is_outside = False  # alembic begins in a transaction that its output does not show
    for statement in statements:
        if statement in (_BEGIN, _COMMIT):
            is_outside = statement == _COMMIT
            if transaction:
                yield tuple(transaction)
            transaction = []
        elif is_outside:
            yield (statement,)
        else:
            transaction.append(statement)
    if transaction:
        yield tuple(transaction)
