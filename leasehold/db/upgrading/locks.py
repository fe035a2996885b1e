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
_WORK = ("", "scan", "rewrite")
_READS, _WRITES, _LETS_WRITE, _SHARE, _REFERENCE, _ALONE = (MODES[place] for place in (0, 2, 3, 4, 5, 7))
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
        return "writes" if place > MODES.index(_LETS_WRITE) else ""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a statement does to existing tables. `narrows`: why older code may fail after it; "" if it only adds.
    `known`: False if no rule matches the statement. `recurses`: it locks the partitions of a table like the table.
    """

    locks: tuple[Lock, ...] = ()
    narrows: str = ""
    known: bool = True
    recurses: bool = True


@dataclass
class Schema:
    """The tables of the database, as the statements of the revisions change them: call `apply` with each in order.

    `index_tables`: the table of each index. `partitions`: the partitions of each partitioned table. `fresh`: the tables
    that this revision has made, which nobody else knows yet. `added`: the columns that this revision has added.
    """

    index_tables: dict[str, str] = field(default_factory=dict)
    partitions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)

    def begin_revision(self) -> None:
        self.fresh, self.added = set(), set()

    def apply(self, statement: str) -> Effect:
        """The effect of the statement on the tables that were there before this revision."""
        text = " ".join(statement.split())
        for pattern, rule in _RULES:
            if found := pattern.match(text):
                return self._seen_by_others(rule(self, found, text))
        return Effect(known=False)

    def _seen_by_others(self, effect: Effect) -> Effect:
        """The effect with only the strongest lock of each table, and without tables that only this revision knows."""
        strongest: dict[str, Lock] = {}
        for lock in self._with_partitions(effect.locks) if effect.recurses else effect.locks:
            before = strongest.get(lock.table)
            if before is None or MODES.index(lock.mode) > MODES.index(before.mode):
                strongest[lock.table] = replace(lock, work=lock.work or (before.work if before else ""))
            elif _WORK.index(lock.work) > _WORK.index(before.work):
                strongest[lock.table] = replace(before, work=lock.work)
        locks = tuple(lock for lock in strongest.values() if lock.table not in self.fresh)
        return replace(effect, locks=locks)

    def _with_partitions(self, locks: Sequence[Lock]) -> Iterator[Lock]:
        for lock in locks:
            parts = self.partitions.get(lock.table, ()) if MODES.index(lock.mode) > 0 else ()
            yield replace(lock, work="") if parts else lock
            yield from (replace(lock, table=part) for part in parts)


_Rule = Callable[[Schema, "re.Match[str]", str], Effect]
_NAME = r'(?:"?\w+"?\.)?"?(\w+)"?'
_NEXT_ACTION = re.compile(r", (?=(?:ADD|ALTER|DROP|VALIDATE|RENAME) )")
_DROPPED, _ADDED = re.compile(rf"DROP CONSTRAINT (?:IF EXISTS )?{_NAME}"), re.compile(rf"ADD CONSTRAINT {_NAME}")
_REFERENCES = re.compile(rf"\bREFERENCES {_NAME}", re.IGNORECASE)


def _references(text: str) -> list[Lock]:
    return [Lock(table, _REFERENCE) for table in _REFERENCES.findall(text)]


def _nothing(_schema: Schema, _found: re.Match[str], _text: str) -> Effect:
    return Effect()


def _create_table(schema: Schema, found: re.Match[str], text: str) -> Effect:
    schema.fresh.add(found[1])
    parent = re.search(rf"\bPARTITION OF {_NAME}", text)
    locks = [Lock(parent[1], _ALONE)] if parent else _references(text)
    return Effect(tuple(locks), recurses=False)


def _create_index(schema: Schema, found: re.Match[str], text: str) -> Effect:
    unique, concurrently, name, table = found.groups()
    schema.index_tables[name] = table
    narrows = ""
    if unique and table not in schema.fresh and not _is_about_new_columns(schema, text):
        narrows = f"{table} refuses rows that older code may write: the unique index {name}"
    return Effect((Lock(table, _LETS_WRITE if concurrently else _SHARE, "scan"),), narrows)


def _drop_index(schema: Schema, found: re.Match[str], _text: str) -> Effect:
    concurrently, name = found.groups()
    table = schema.index_tables.get(name)
    if table is None:
        return Effect(known="IF EXISTS" in found[0])
    return Effect((Lock(table, _LETS_WRITE if concurrently else _ALONE),))


def _alter_table(schema: Schema, found: re.Match[str], _text: str) -> Effect:
    """A statement may have several actions: their locks and their work add up."""
    table, actions = found.groups()
    effects = [_action(schema, table, action) for action in _NEXT_ACTION.split(actions)]
    replaced = set(_DROPPED.findall(actions)) & set(_ADDED.findall(actions))
    # The statement may replace a check by another of the same name. No rule can tell whether the new check refuses
    # more: the revision's docstring says it.
    narrows = "; ".join(effect.narrows for effect in effects if effect.narrows and not replaced)
    locks = tuple(lock for effect in effects for lock in effect.locks)
    return Effect(locks, narrows, known=all(effect.known for effect in effects))


def _action(schema: Schema, table: str, action: str) -> Effect:
    for pattern, rule in _ACTIONS:
        if matched := pattern.match(action):
            return rule(schema, table, matched, action)
    return Effect(known=False)


def _add_column(schema: Schema, table: str, found: re.Match[str], action: str) -> Effect:
    schema.added.add(found[1])
    rewrites = "GENERATED" in action or any(f"{name}(" in action for name in _VOLATILE)
    refuses = "NOT NULL" in action and "DEFAULT" not in action and "GENERATED" not in action
    narrows = f"{table}.{found[1]} has no default: older code writes none" if refuses else ""
    lock = Lock(table, _ALONE, "rewrite" if rewrites else "scan" if refuses else "")
    return Effect((lock, *_references(action)), narrows)


def _add_constraint(schema: Schema, table: str, found: re.Match[str], action: str) -> Effect:
    work = "" if "NOT VALID" in action or "USING INDEX" in action else "scan"
    narrows = "" if _is_about_new_columns(schema, action) else f"{table} refuses rows that older code may write"
    if found[2] == "FOREIGN KEY":
        # PostgreSQL finds the rows of the other table by their key, so it does not scan that table.
        return Effect((Lock(table, _REFERENCE, work), *_references(action)), narrows)
    return Effect((Lock(table, _ALONE, work),), narrows)


def _validate(_schema: Schema, table: str, _found: re.Match[str], _action: str) -> Effect:
    return Effect((Lock(table, _LETS_WRITE, "scan"),))


def _store(_schema: Schema, table: str, _found: re.Match[str], _action: str) -> Effect:
    """SET (fillfactor) changes only pages that PostgreSQL writes later."""
    return Effect((Lock(table, _LETS_WRITE),))


def _narrow(work: str, reason: str) -> Callable[[Schema, str, re.Match[str], str], Effect]:
    def rule(_schema: Schema, table: str, found: re.Match[str], _action: str) -> Effect:
        return Effect((Lock(table, _ALONE, work),), reason.format(table=table, name=found[1]))

    return rule


def _loosen(_schema: Schema, table: str, _found: re.Match[str], _action: str) -> Effect:
    return Effect((Lock(table, _ALONE),))


def _drop_table(_schema: Schema, found: re.Match[str], _text: str) -> Effect:
    return Effect((Lock(found[1], _ALONE),), f"{found[1]} is gone")


def _drop_other(_schema: Schema, found: re.Match[str], _text: str) -> Effect:
    return Effect(narrows=f"{found[2]} is gone")


def _update(_schema: Schema, found: re.Match[str], text: str) -> Effect:
    others = [Lock(name, _READS) for name in _sources(text) if name != found[1]]
    return Effect((Lock(found[1], _WRITES, "scan"), *others))


def _create_view(_schema: Schema, _found: re.Match[str], text: str) -> Effect:
    return Effect(tuple(Lock(name, _READS) for name in _sources(text)))


def _create_trigger(_schema: Schema, found: re.Match[str], _text: str) -> Effect:
    return Effect((Lock(found[1], _REFERENCE),))


def _sources(text: str) -> list[str]:
    return re.findall(rf"\b(?:FROM|JOIN) {_NAME}", text)


def _is_about_new_columns(schema: Schema, text: str) -> bool:
    return any(re.search(rf"\b{column}\b", text) for column in schema.added)


_RULES: Sequence[tuple[re.Pattern[str], _Rule]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"(?:SET|RESET) \w+", _nothing),
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
        (rf"CREATE VIEW {_NAME}", _create_view),
        (rf"CREATE (?:CONSTRAINT )?TRIGGER \w+ .*? ON {_NAME}", _create_trigger),
        (r"CREATE (?:OR REPLACE )?FUNCTION ", _nothing),
        (r"REVOKE ALL ON FUNCTION ", _nothing),
        (r"DO \$do\$ BEGIN EXECUTE format\('ALTER FUNCTION [^;]*; END \$do\$$", _nothing),
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
        (r"SET \(fillfactor = \d+\)", _store),
        (rf"RENAME (?:COLUMN )?(?:{_NAME} )?TO", _narrow("", "{table} is not what older code names")),
    )
]
