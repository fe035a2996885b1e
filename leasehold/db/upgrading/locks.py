"""Computes the effect of each statement of a revision (a migration): which table locks it takes, which tables it scans
or rewrites, and why older code may fail after it.

plan.py shows the locks and tables before an upgrade. The rules are PostgreSQL's. tests/upgrades/test_measured_locks.py
runs every statement of every revision on a real PostgreSQL, and compares what `pg_locks` shows with the rules here. If
no rule matches a statement, its effect is not known (`Effect.known`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

_ACCESS_SHARE = "ACCESS SHARE"
_ROW_EXCLUSIVE = "ROW EXCLUSIVE"
_SHARE_UPDATE_EXCLUSIVE = "SHARE UPDATE EXCLUSIVE"
_SHARE = "SHARE"
_SHARE_ROW_EXCLUSIVE = "SHARE ROW EXCLUSIVE"
_ACCESS_EXCLUSIVE = "ACCESS EXCLUSIVE"
#: The modes of PostgreSQL's table locks, from the weakest to the strongest.
MODES = (
    _ACCESS_SHARE,
    "ROW SHARE",
    _ROW_EXCLUSIVE,
    _SHARE_UPDATE_EXCLUSIVE,
    _SHARE,
    _SHARE_ROW_EXCLUSIVE,
    "EXCLUSIVE",
    _ACCESS_EXCLUSIVE,
)
#: What a statement does with a table, from the least to the most.
_WORK = ("", "scan", "rewrite")
#: Functions whose value differs from row to row. If a new column has such a function as its default, PostgreSQL
#: rewrites the table.
_VOLATILE = (
    "clock_timestamp",
    "gen_random_uuid",
    "random",
    "timeofday",
    "nextval",
    "uuid_generate_v1",
    "uuid_generate_v4",
    "uuidv4",
    "uuidv7",
)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock on a table. `work`: what the statement does with the table while it holds the lock: "", "scan" or
    "rewrite".
    """

    table: str
    mode: str
    work: str = ""

    @property
    def stops(self) -> str:
        """What waits while somebody holds this lock: "reads and writes", "writes" or ""."""
        if self.mode == _ACCESS_EXCLUSIVE:
            return "reads and writes"
        return "writes" if MODES.index(self.mode) > MODES.index(_SHARE_UPDATE_EXCLUSIVE) else ""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a statement does to existing tables. `narrows`: why older code may fail after the statement; "": older code
    still works. `known`: False if no rule matches the statement. `recurses`: the statement also locks the partitions of
    a table.
    """

    locks: tuple[Lock, ...] = ()
    narrows: str = ""
    known: bool = True
    recurses: bool = True


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """The foreign key `name` of `columns` of `table`, which refer to the table `other`."""

    table: str
    name: str
    columns: frozenset[str]
    other: str


@dataclass
class SchemaTables:
    """The tables of the database, as far as the rules need them. Call `apply` with each statement of the revisions, in
    their order. `apply` returns the effect of the statement, and updates this object.

    `index_tables`: the table of each index. `partitions`: the partitions of each partitioned table. `foreign_keys`: the
    foreign keys that the database had before the revisions. `new_tables`: the tables that this revision has made, which
    nobody else uses yet. `new_columns`: the columns that this revision has added.
    """

    index_tables: dict[str, str] = field(default_factory=dict)
    partitions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    foreign_keys: Sequence[ForeignKey] = ()
    new_tables: set[str] = field(default_factory=set)
    new_columns: set[str] = field(default_factory=set)

    def begin_revision(self) -> None:
        self.new_tables, self.new_columns = set(), set()

    def apply(self, statement: str) -> Effect:
        """The effect of the statement on the tables that were there before this revision."""
        text = " ".join(statement.split())
        for pattern, rule in _RULES:
            if match := pattern.match(text):
                return self._merge_locks(rule(self, match, text))
        return Effect(known=False)

    def _merge_locks(self, effect: Effect) -> Effect:
        """The effect with one lock for each table: the strongest mode, and the most work. Tables that this revision has
        made are left out, because nobody else uses them.
        """
        lock_by_table: dict[str, Lock] = {}
        for lock in self._with_partitions(effect.locks) if effect.recurses else effect.locks:
            earlier_lock = lock_by_table.get(lock.table, lock)
            mode = max(lock.mode, earlier_lock.mode, key=MODES.index)
            lock_by_table[lock.table] = Lock(lock.table, mode, max(lock.work, earlier_lock.work, key=_WORK.index))
        locks = tuple(lock for lock in lock_by_table.values() if lock.table not in self.new_tables)
        return replace(effect, locks=locks)

    def _with_partitions(self, locks: Sequence[Lock]) -> Iterator[Lock]:
        """The locks, and the same locks on the partitions. A table with partitions has no rows of its own, so the
        statement does its work in the partitions. An ACCESS SHARE lock is not repeated for the partitions, because
        CREATE VIEW locks only the table that it names.
        """
        for lock in locks:
            partitions = self.partitions.get(lock.table, ()) if lock.mode != _ACCESS_SHARE else ()
            yield replace(lock, work="") if partitions else lock
            yield from (replace(lock, table=partition) for partition in partitions)


#: A rule computes the effect of a statement from the tables, the match of the rule's pattern, and the statement's text.
#: A rule for an action of an ALTER TABLE also gets the table's name, and the text of its action only.
_Rule = Callable[[SchemaTables, "re.Match[str]", str], Effect]
#: A name, with or without its schema and quotes. The group is the name itself. A statement with ONLY before a name
#: matches no rule.
_NAME = r'(?!ONLY\b)(?:"?\w+"?\.)?"?(\w+)"?'
#: The comma between two actions of an ALTER TABLE.
_NEXT_ACTION = re.compile(r", (?=(?:ADD|ALTER|DROP|VALIDATE|RENAME) )")
_DROPPED_CONSTRAINT = re.compile(rf"DROP CONSTRAINT (?:IF EXISTS )?{_NAME}")
_ADDED_CONSTRAINT = re.compile(rf"ADD CONSTRAINT {_NAME}")
#: A text in quotes. `_add_column` removes such texts before it looks for keywords, such as DEFAULT.
_QUOTED = re.compile(r"'[^']*'")
#: Column types whose default is a number from a sequence.
_SERIAL = re.compile(r"\b(?:small|big)?serial\b", re.IGNORECASE)
#: Constraints of a new column for which PostgreSQL reads the whole table, even if the column is NULL everywhere.
_CHECKED = re.compile(r"\b(?:CHECK|UNIQUE|PRIMARY KEY)\b")
_REFERENCES = re.compile(rf"\bREFERENCES {_NAME}", re.IGNORECASE)


def _locks_of_references(text: str) -> list[Lock]:
    """The locks on the tables to which a new foreign key refers."""
    return [Lock(table, _SHARE_ROW_EXCLUSIVE) for table in _REFERENCES.findall(text)]


def _locks_of_dropped_keys(schema: SchemaTables, table: str, name: str | None = None) -> list[Lock]:
    """The locks on the tables to which the dropped foreign keys of `table` refer. PostgreSQL locks these tables,
    because it also drops triggers of them. `name`: the dropped constraint or column; None: `table` itself is dropped.
    """
    return [
        Lock(key.other, _ACCESS_EXCLUSIVE)
        for key in schema.foreign_keys
        if key.table == table and (name is None or name == key.name or name in key.columns)
    ]


def _unknown(_schema: SchemaTables, _match: re.Match[str], _text: str) -> Effect:
    return Effect(known=False)


def _no_effect(_schema: SchemaTables, _match: re.Match[str], _text: str) -> Effect:
    return Effect()


def _create_table(schema: SchemaTables, match: re.Match[str], text: str) -> Effect:
    schema.new_tables.add(match[1])
    parent = re.search(rf"\bPARTITION OF {_NAME}", text)
    locks = [Lock(parent[1], _ACCESS_EXCLUSIVE)] if parent else _locks_of_references(text)
    # A new partition locks its parent, but not the other partitions.
    return Effect(tuple(locks), recurses=False)


def _create_index(schema: SchemaTables, match: re.Match[str], text: str) -> Effect:
    unique, concurrently, name, table = match.groups()
    schema.index_tables[name] = table
    narrows = ""
    if unique and table not in schema.new_tables and not _names_new_column(schema, text):
        narrows = f"{table} refuses rows that older code may write: the unique index {name}"
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE if concurrently else _SHARE, "scan"),), narrows)


def _drop_index(schema: SchemaTables, match: re.Match[str], _text: str) -> Effect:
    concurrently, name = match.groups()
    table = schema.index_tables.get(name)
    if table is None:
        return Effect(known="IF EXISTS" in match[0])  # without such an index the statement does nothing
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE if concurrently else _ACCESS_EXCLUSIVE),))


def _alter_table(schema: SchemaTables, match: re.Match[str], _text: str) -> Effect:
    """A statement may have several actions. It takes the locks and does the work of all of them."""
    table, actions = match.groups()
    effects = [_effect_of_action(schema, table, action) for action in _NEXT_ACTION.split(actions)]
    replaced_constraints = set(_DROPPED_CONSTRAINT.findall(actions)) & set(_ADDED_CONSTRAINT.findall(actions))
    # If the statement drops a constraint and adds another one of the same name, no rule can decide whether the new
    # constraint refuses more rows. Then `narrows` is empty, and the revision's docstring must say what the statement
    # narrows.
    narrows = "; ".join(effect.narrows for effect in effects if effect.narrows and not replaced_constraints)
    locks = tuple(lock for effect in effects for lock in effect.locks)
    return Effect(locks, narrows, known=all(effect.known for effect in effects))


def _effect_of_action(schema: SchemaTables, table: str, action: str) -> Effect:
    for pattern, rule in _ACTIONS:
        if match := pattern.match(action):
            return rule(schema, table, match, action)
    return Effect(known=False)


def _add_column(schema: SchemaTables, table: str, match: re.Match[str], action: str) -> Effect:
    # PostgreSQL rewrites the table if the value of the new column differs from row to row (`is_rewrite`). It scans the
    # table if a row could break a constraint of the new column (`needs_value`, `is_checked`).
    schema.new_columns.add(match[1])
    action = _QUOTED.sub("''", action)
    is_serial = _SERIAL.search(action) is not None
    is_rewrite = is_serial or "GENERATED" in action or any(f"{name}(" in action for name in _VOLATILE)
    has_value = is_serial or "DEFAULT" in action or "GENERATED" in action
    needs_value = "NOT NULL" in action and not has_value
    is_checked = _CHECKED.search(action) is not None or (has_value and "REFERENCES" in action)
    narrows = f"{table}.{match[1]} has no default: older code writes no value" if needs_value else ""
    # If the column needs a value, the scan looks for a row without one.
    work = "rewrite" if is_rewrite else "scan" if needs_value or is_checked else ""
    lock = Lock(table, _ACCESS_EXCLUSIVE, work)
    return Effect((lock, *_locks_of_references(action)), narrows)


def _add_constraint(schema: SchemaTables, table: str, match: re.Match[str], action: str) -> Effect:
    # If the constraint is NOT VALID, or if its index exists already (USING INDEX), PostgreSQL does not scan the table.
    # A primary key is an exception: it makes its columns NOT NULL, so PostgreSQL scans the table for NULL even if the
    # index exists.
    is_trusted = "NOT VALID" in action or ("USING INDEX" in action and match[2] != "PRIMARY KEY")
    work = "" if is_trusted else "scan"
    narrows = "" if _names_new_column(schema, action) else f"{table} refuses rows that older code may write"
    if match[2] == "FOREIGN KEY":
        # PostgreSQL finds the rows of the other table by their key, so it does not scan that table.
        return Effect((Lock(table, _SHARE_ROW_EXCLUSIVE, work), *_locks_of_references(action)), narrows)
    return Effect((Lock(table, _ACCESS_EXCLUSIVE, work),), narrows)


def _validate(_schema: SchemaTables, table: str, _match: re.Match[str], _action: str) -> Effect:
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE, "scan"),))


def _set_storage(_schema: SchemaTables, table: str, _match: re.Match[str], _action: str) -> Effect:
    """SET (fillfactor) changes only pages that PostgreSQL writes later."""
    return Effect((Lock(table, _SHARE_UPDATE_EXCLUSIVE),))


def _narrowing(work: str, reason: str) -> Callable[[SchemaTables, str, re.Match[str], str], Effect]:
    """Make a rule for an action after which older code may fail, for the `reason`. `work`: as in Lock."""

    def rule(_schema: SchemaTables, table: str, match: re.Match[str], _action: str) -> Effect:
        return Effect((Lock(table, _ACCESS_EXCLUSIVE, work),), reason.format(table=table, name=match[1]))

    return rule


def _loosen(_schema: SchemaTables, table: str, _match: re.Match[str], _action: str) -> Effect:
    """The action allows more than before, so older code still works."""
    return Effect((Lock(table, _ACCESS_EXCLUSIVE),))


def _drop_column(schema: SchemaTables, table: str, match: re.Match[str], _action: str) -> Effect:
    locks = (Lock(table, _ACCESS_EXCLUSIVE), *_locks_of_dropped_keys(schema, table, match[1]))
    return Effect(locks, f"{table}.{match[1]} is gone")


def _drop_constraint(schema: SchemaTables, table: str, match: re.Match[str], _action: str) -> Effect:
    """Older code still works, because the table allows more than before."""
    return Effect((Lock(table, _ACCESS_EXCLUSIVE), *_locks_of_dropped_keys(schema, table, match[1])))


def _drop_table(schema: SchemaTables, match: re.Match[str], _text: str) -> Effect:
    locks = (Lock(match[1], _ACCESS_EXCLUSIVE), *_locks_of_dropped_keys(schema, match[1]))
    return Effect(locks, f"{match[1]} is gone")


def _drop_trigger(_schema: SchemaTables, match: re.Match[str], _text: str) -> Effect:
    return Effect((Lock(match[2], _ACCESS_EXCLUSIVE),), f"{match[1]} is gone")


def _drop_object(_schema: SchemaTables, match: re.Match[str], _text: str) -> Effect:
    return Effect(narrows=f"{match[2]} is gone")


def _write_rows(_schema: SchemaTables, match: re.Match[str], text: str) -> Effect:
    read_locks = [Lock(name, _ACCESS_SHARE) for name in _tables_read(text) if name != match[1]]
    return Effect((Lock(match[1], _ROW_EXCLUSIVE, "scan"), *read_locks))


def _create_view(_schema: SchemaTables, _match: re.Match[str], text: str) -> Effect:
    return Effect(tuple(Lock(name, _ACCESS_SHARE) for name in _tables_read(text)))


def _create_trigger(_schema: SchemaTables, match: re.Match[str], _text: str) -> Effect:
    return Effect((Lock(match[1], _SHARE_ROW_EXCLUSIVE),))


def _tables_read(text: str) -> list[str]:
    return re.findall(rf"\b(?:FROM|JOIN|USING) {_NAME}", text)


def _names_new_column(schema: SchemaTables, text: str) -> bool:
    """Whether the text names a column that this revision adds. Older code does not write this column, so a constraint
    on it does not refuse the rows of older code.
    """
    return any(re.search(rf"\b{column}\b", text) for column in schema.new_columns)


#: The rules for statements. The first rule that matches decides.
_RULES: Sequence[tuple[re.Pattern[str], _Rule]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"(?:SET|RESET) \w+", _no_effect),
        (rf"CREATE TABLE (?:IF NOT EXISTS )?{_NAME}", _create_table),
        (
            rf"CREATE (UNIQUE )?INDEX (CONCURRENTLY )?(?:IF NOT EXISTS )?{_NAME} ON {_NAME}",
            _create_index,
        ),
        # No rule finds all the tables that are locked by a DROP of several objects, or by a statement with CASCADE.
        (r"(?:DROP|ALTER TABLE) .* CASCADE\b|DROP [^(]*,", _unknown),
        (rf"DROP INDEX (CONCURRENTLY )?(?:IF EXISTS )?{_NAME}", _drop_index),
        (rf"ALTER TABLE (?:IF EXISTS )?{_NAME} (.+)", _alter_table),
        (rf"DROP TABLE (?:IF EXISTS )?{_NAME}", _drop_table),
        (rf"DROP TRIGGER (?:IF EXISTS )?{_NAME} ON {_NAME}", _drop_trigger),
        (rf"DROP (VIEW|FUNCTION) (?:IF EXISTS )?{_NAME}", _drop_object),
        (rf"(?:UPDATE|DELETE FROM|INSERT INTO) {_NAME}", _write_rows),
        (rf"CREATE (?:OR REPLACE )?VIEW {_NAME}", _create_view),
        (rf"CREATE (?:OR REPLACE )?(?:CONSTRAINT )?TRIGGER \w+ .*? ON {_NAME}", _create_trigger),
        (r"CREATE (?:OR REPLACE )?FUNCTION ", _no_effect),
        (r"REVOKE ALL ON FUNCTION ", _no_effect),
        (r"DO \$do\$ BEGIN EXECUTE format\('ALTER FUNCTION [^;]*; END \$do\$$", _no_effect),
    )
]
#: The rules for the actions of an ALTER TABLE.
_ACTIONS: Sequence[tuple[re.Pattern[str], Callable[[SchemaTables, str, re.Match[str], str], Effect]]] = [
    (re.compile(pattern), rule)
    for pattern, rule in (
        (rf"ADD COLUMN (?:IF NOT EXISTS )?{_NAME}", _add_column),
        (rf"ADD (?:CONSTRAINT {_NAME} )?(CHECK|UNIQUE|PRIMARY KEY|FOREIGN KEY)", _add_constraint),
        (rf"VALIDATE CONSTRAINT {_NAME}", _validate),
        (
            rf"ALTER COLUMN {_NAME} SET NOT NULL",
            _narrowing("scan", "{table}.{name} refuses NULL, which older code may write"),
        ),
        (rf"ALTER COLUMN {_NAME} TYPE", _narrowing("rewrite", "{table}.{name} has another type")),
        (rf"ALTER COLUMN {_NAME} (?:DROP NOT NULL|SET DEFAULT)", _loosen),
        (
            rf"ALTER COLUMN {_NAME} DROP DEFAULT",
            _narrowing("", "{table}.{name} has no default: older code writes no value"),
        ),
        (rf"DROP COLUMN (?:IF EXISTS )?{_NAME}", _drop_column),
        (rf"DROP CONSTRAINT (?:IF EXISTS )?{_NAME}", _drop_constraint),
        (r"SET \(fillfactor = \d+\)", _set_storage),
        (
            rf"RENAME (?:COLUMN )?(?:{_NAME} )?TO",
            _narrowing("", "{table}, or a column of it, has a new name; older code uses the old one"),
        ),
    )
]
