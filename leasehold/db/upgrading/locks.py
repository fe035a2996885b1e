"""Computes which tables a statement of a revision locks, how, and whether it scans or rewrites them. For plan.py.

The rules are PostgreSQL's. tests/upgrades/test_measured_locks.py runs every statement of every revision on a real
PostgreSQL, and compares what `pg_locks` shows with these rules. A statement that no rule matches is `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: From the weakest to the strongest.
MODES = (
    "ACCESS SHARE",
    "ROW SHARE",
    "ROW EXCLUSIVE",
    "SHARE UPDATE EXCLUSIVE",
    "SHARE",
    "SHARE ROW EXCLUSIVE",
    "EXCLUSIVE",
    "ACCESS EXCLUSIVE",
)
#: From the least to the most.
_WORK = ("", "scan", "rewrite")
_ACCESS_SHARE, _ROW_EXCLUSIVE, _SHARE_UPDATE_EXCLUSIVE, _SHARE, _SHARE_ROW_EXCLUSIVE, _ACCESS_EXCLUSIVE = (
    MODES[place] for place in (0, 2, 3, 4, 5, 7)
)
#: Functions whose value differs from row to row: a column with such a default makes PostgreSQL rewrite the table.
_VOLATILE = ("clock_timestamp", "gen_random_uuid", "random", "timeofday", "nextval", "txid_current", "uuid_generate")


@dataclass(frozen=True, slots=True)
class Lock:
    """`work`: what the statement does with the table while it holds the lock: "", "scan" or "rewrite"."""

    table: str
    mode: str
    work: str = ""

    @property
    def stops(self) -> str:
        """What waits while somebody holds this lock: "reads and writes", "writes" or ""."""
        place = MODES.index(self.mode)
        if place == len(MODES) - 1:
            return "reads and writes"
        return "writes" if place > MODES.index(_SHARE_UPDATE_EXCLUSIVE) else ""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a statement does to existing tables. `narrows`: why older code may fail after it; "" if it only adds.
    `known`: False if no rule matches the statement. `recurses`: the statement also locks the partitions of a table.
    """

    locks: tuple[Lock, ...] = ()
    narrows: str = ""
    known: bool = True
    recurses: bool = True


@dataclass
class Schema:
    """The tables of the database, as the statements of the revisions change them: call `apply` with each in order.

    `index_tables`: the table of each index. `partitions`: the partitions of each partitioned table. `new_tables`: the
    tables that this revision has made, which nobody else uses yet. `new_columns`: the columns that this revision has
    added.
    """

    index_tables: dict[str, str] = field(default_factory=dict)
    partitions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    new_tables: set[str] = field(default_factory=set)
    new_columns: set[str] = field(default_factory=set)

    def begin_revision(self) -> None:
        self.new_tables, self.new_columns = set(), set()

    def apply(self, statement: str) -> Effect:
        """The effect of the statement on the tables that were there before this revision."""
        text = " ".join(statement.split())
        for pattern, rule in _RULES:
            if match := pattern.match(text):
                return self._seen_by_others(rule(self, match, text))
        return Effect(known=False)

    def _seen_by_others(self, effect: Effect) -> Effect:
        """The effect with one lock for each table: the strongest mode, and the most work. Tables that only this
        revision uses are left out.
        """
        by_table: dict[str, Lock] = {}
        for lock in self._with_partitions(effect.locks) if effect.recurses else effect.locks:
            other = by_table.get(lock.table, lock)
            mode = max(lock.mode, other.mode, key=MODES.index)
            by_table[lock.table] = Lock(lock.table, mode, max(lock.work, other.work, key=_WORK.index))
        locks = tuple(lock for lock in by_table.values() if lock.table not in self.new_tables)
        return replace(effect, locks=locks)

    def _with_partitions(self, locks: Sequence[Lock]) -> Iterator[Lock]:
        """The locks, and the same locks on the partitions. A table with partitions has no rows of its own."""
        for lock in locks:
            partitions = self.partitions.get(lock.table, ()) if lock.mode != _ACCESS_SHARE else ()
            yield replace(lock, work="") if partitions else lock
            yield from (replace(lock, table=partition) for partition in partitions)


_Rule = Callable[[Schema, "re.Match[str]", str], Effect]
_NAME = r'(?:"?\w+"?\.)?"?(\w+)"?'
_NEXT_ACTION = re.compile(r", (?=(?:ADD|ALTER|DROP|VALIDATE|RENAME) )")
_DROPPED, _ADDED = re.compile(rf"DROP CONSTRAINT (?:IF EXISTS )?{_NAME}"), re.compile(rf"ADD CONSTRAINT {_NAME}")
_REFERENCES = re.compile(rf"\bREFERENCES {_NAME}", re.IGNORECASE)


def _references(text: str) -> list[Lock]:
    return [Lock(table, _SHARE_ROW_EXCLUSIVE) for table in _REFERENCES.findall(text)]


def _no_effect(_schema: Schema, _match: re.Match[str], _text: str) -> Effect:
    return Effect()


def _create_table(schema: Schema, match: re.Match[str], text: str) -> Effect:
    schema.new_tables.add(match[1])
    parent = re.search(rf"\bPARTITION OF {_NAME}", text)
    locks = [Lock(parent[1], _ACCESS_EXCLUSIVE)] if parent else _references(text)
    return Effect(tuple(locks), recurses=False)


def _create_index(schema: Schema, match: re.Match[str], text: str) -> Effect:
    unique, concurrently, name, table = match.groups()
    schema.index_tables[name] = table
    narrows = ""
    if unique and table not in schema.new_tables and not _names_new_column(schema, text):
        narrows = f"{table} refuses rows that older code may write: the unique index {name}"
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE if concurrently else _SHARE, "scan"),), narrows)


def _drop_index(schema: Schema, match: re.Match[str], _text: str) -> Effect:
    concurrently, name = match.groups()
    table = schema.index_tables.get(name)
    if table is None:
        return Effect(known="IF EXISTS" in match[0])
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE if concurrently else _ACCESS_EXCLUSIVE),))


def _alter_table(schema: Schema, match: re.Match[str], _text: str) -> Effect:
    """A statement may have several actions: their locks and their work add up."""
    table, actions = match.groups()
    effects = [_action(schema, table, action) for action in _NEXT_ACTION.split(actions)]
    replaced = set(_DROPPED.findall(actions)) & set(_ADDED.findall(actions))
    # The statement may replace a constraint by another of the same name. No rule can know whether the new constraint
    # refuses more: the revision's docstring says so.
    narrows = "; ".join(effect.narrows for effect in effects if effect.narrows and not replaced)
    locks = tuple(lock for effect in effects for lock in effect.locks)
    return Effect(locks, narrows, known=all(effect.known for effect in effects))


def _action(schema: Schema, table: str, action: str) -> Effect:
    for pattern, rule in _ACTIONS:
        if match := pattern.match(action):
            return rule(schema, table, match, action)
    return Effect(known=False)


def _add_column(schema: Schema, table: str, match: re.Match[str], action: str) -> Effect:
    schema.new_columns.add(match[1])
    rewrites = "GENERATED" in action or any(f"{name}(" in action for name in _VOLATILE)
    refuses = "NOT NULL" in action and "DEFAULT" not in action and "GENERATED" not in action
    narrows = f"{table}.{match[1]} has no default: older code writes none" if refuses else ""
    lock = Lock(table, _ACCESS_EXCLUSIVE, "rewrite" if rewrites else "scan" if refuses else "")
    return Effect((lock, *_references(action)), narrows)


def _add_constraint(schema: Schema, table: str, match: re.Match[str], action: str) -> Effect:
    work = "" if "NOT VALID" in action or "USING INDEX" in action else "scan"
    narrows = "" if _names_new_column(schema, action) else f"{table} refuses rows that older code may write"
    if match[2] == "FOREIGN KEY":
        # PostgreSQL finds the rows of the other table by their key, so it does not scan that table.
        return Effect((Lock(table, _SHARE_ROW_EXCLUSIVE, work), *_references(action)), narrows)
    return Effect((Lock(table, _ACCESS_EXCLUSIVE, work),), narrows)


def _validate(_schema: Schema, table: str, _match: re.Match[str], _action: str) -> Effect:
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE, "scan"),))


def _set_storage(_schema: Schema, table: str, _match: re.Match[str], _action: str) -> Effect:
    """SET (fillfactor) changes only pages that PostgreSQL writes later."""
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE),))


def _narrow(work: str, reason: str) -> Callable[[Schema, str, re.Match[str], str], Effect]:
    """A rule for an action after which older code may fail, for the `reason`."""

    def rule(_schema: Schema, table: str, match: re.Match[str], _action: str) -> Effect:
        return Effect((Lock(table, _ACCESS_EXCLUSIVE, work),), reason.format(table=table, name=match[1]))

    return rule


def _loosen(_schema: Schema, table: str, _match: re.Match[str], _action: str) -> Effect:
    """The action allows more than before, so older code still works."""
    return Effect((Lock(table, _ACCESS_EXCLUSIVE),))


def _drop_table(_schema: Schema, match: re.Match[str], _text: str) -> Effect:
    return Effect((Lock(match[1], _ACCESS_EXCLUSIVE),), f"{match[1]} is gone")


def _drop_other(_schema: Schema, match: re.Match[str], _text: str) -> Effect:
    return Effect(narrows=f"{match[2]} is gone")


def _update(_schema: Schema, match: re.Match[str], text: str) -> Effect:
    others = [Lock(name, _ACCESS_SHARE) for name in _sources(text) if name != match[1]]
    return Effect((Lock(match[1], _ROW_EXCLUSIVE, "scan"), *others))


def _create_view(_schema: Schema, _match: re.Match[str], text: str) -> Effect:
    return Effect(tuple(Lock(name, _ACCESS_SHARE) for name in _sources(text)))


def _create_trigger(_schema: Schema, match: re.Match[str], _text: str) -> Effect:
    return Effect((Lock(match[1], _SHARE_ROW_EXCLUSIVE),))


def _sources(text: str) -> list[str]:
    return re.findall(rf"\b(?:FROM|JOIN) {_NAME}", text)


def _names_new_column(schema: Schema, text: str) -> bool:
    return any(re.search(rf"\b{column}\b", text) for column in schema.new_columns)


_RULES: Sequence[tuple[re.Pattern[str], _Rule]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"(?:SET|RESET) \w+", _no_effect),
        (rf"CREATE TABLE (?:IF NOT EXISTS )?{_NAME}", _create_table),
        (
            rf"CREATE (UNIQUE )?INDEX (CONCURRENTLY )?(?:IF NOT EXISTS )?{_NAME} ON {_NAME}",
            _create_index,
        ),
        (rf"DROP INDEX (CONCURRENTLY )?(?:IF EXISTS )?{_NAME}", _drop_index),
        (rf"ALTER TABLE {_NAME} (.+)", _alter_table),
        (rf"DROP TABLE (?:IF EXISTS )?{_NAME}", _drop_table),
        (rf"DROP (VIEW|FUNCTION|TRIGGER) (?:IF EXISTS )?{_NAME}", _drop_other),
        (rf"(?:UPDATE|DELETE FROM|INSERT INTO) {_NAME}", _update),
        (rf"CREATE (?:OR REPLACE )?VIEW {_NAME}", _create_view),
        (rf"CREATE (?:CONSTRAINT )?TRIGGER \w+ .*? ON {_NAME}", _create_trigger),
        (r"CREATE (?:OR REPLACE )?FUNCTION ", _no_effect),
        (r"REVOKE ALL ON FUNCTION ", _no_effect),
        (r"DO \$do\$ BEGIN EXECUTE format\('ALTER FUNCTION [^;]*; END \$do\$$", _no_effect),
    )
]
_ACTIONS: Sequence[tuple[re.Pattern[str], Callable[[Schema, str, re.Match[str], str], Effect]]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (rf"ADD COLUMN (?:IF NOT EXISTS )?{_NAME}", _add_column),
        (rf"ADD CONSTRAINT {_NAME} (CHECK|UNIQUE|PRIMARY KEY|FOREIGN KEY)", _add_constraint),
        (rf"VALIDATE CONSTRAINT {_NAME}", _validate),
        (
            rf"ALTER COLUMN {_NAME} SET NOT NULL",
            _narrow("scan", "{table}.{name} refuses what older code may leave out"),
        ),
        (rf"ALTER COLUMN {_NAME} TYPE", _narrow("rewrite", "{table}.{name} has another type")),
        (rf"ALTER COLUMN {_NAME} (?:DROP NOT NULL|SET DEFAULT)", _loosen),
        (rf"ALTER COLUMN {_NAME} DROP DEFAULT", _narrow("", "{table}.{name} has no default: older code writes none")),
        (rf"DROP COLUMN (?:IF EXISTS )?{_NAME}", _narrow("", "{table}.{name} is gone")),
        (rf"DROP CONSTRAINT (?:IF EXISTS )?{_NAME}", _loosen),
        (r"SET \(fillfactor = \d+\)", _set_storage),
        (rf"RENAME (?:COLUMN )?(?:{_NAME} )?TO", _narrow("", "{table} is not what older code names")),
    )
]
