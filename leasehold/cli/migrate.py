"""`leasehold migrate`: plans a migration, or runs it and grants rights to the role `database_app_role`.

The platform has a schema (CORE). A kind of work that has its own tables has a schema of its own, with its own
migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from alembic.script.revision import RevisionError
from alembic.util import CommandError

from leasehold.cli.running import command_actor
from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Connection, connected, migrate
from leasehold.db.poolers import refuse_shared_sessions
from leasehold.db.roles import check_role, grant
from leasehold.db.schemas import CORE, Schema, state_of
from leasehold.db.upgrading.patience import Patience, Progress
from leasehold.db.upgrading.plan import Plan, plan_of
from leasehold.db.upgrading.rendering import passed_revision
from leasehold.domain.errors import Invalid
from leasehold.domain.registry import Pipelines
from leasehold.domain.sentences import full_stop
from leasehold.kinds.schemas import schemas_of
from leasehold.pipelines import kinds_of
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings


async def plan_of_upgrade(settings: Settings, revision: str) -> Plan:
    """The plan of what `upgrade` would do. Nothing is changed. Raises Invalid for an unknown revision, and
    for a revision that the schema has passed.
    """
    settings = settings.direct()  # connect to PostgreSQL itself, not to a pooler
    schemas = schemas_of(kinds_of(Pipelines.from_source(settings.pipelines)))
    async with connected(settings, "migrate") as connection:
        with _refusing_unknown_revision():
            await _check_not_passed(connection, revision)
            return await plan_of(connection, schemas, revision)


@contextmanager
def _refusing_unknown_revision() -> Iterator[None]:
    """Use this around code that gives a revision to alembic. If alembic does not know the revision, raises Invalid."""
    try:
        yield
    except (CommandError, RevisionError) as error:
        raise Invalid("unknown_revision", full_stop(str(error))) from None


async def upgrade(settings: Settings, revision: str, report: Callable[[str], None] = lambda _: None) -> None:
    """Bring the platform's schema to `revision`. With `head`, bring the schemas of all kinds of work up to date, too.
    The audit gets a row for each schema that changed.

    With `head`, a schema that a newer release has migrated stays as it is, because processes of this release work with
    such a schema, too. So an installation can go back to this release. `report` is called with a sentence about such a
    schema, or about other sessions for which the migration waits.

    Before any change it may raise: DeclarationError for an unknown kind; Invalid for an unknown revision, and for a
    revision that the schema has passed; Invalid if the role `database_app_role` does not exist, or has the right to
    change the schema; BadSetting if a pooler shares sessions. Later it raises SchemaLocked if a revision gets no lock.
    The earlier revisions then stay applied.
    """
    settings = settings.direct()
    # Without a direct URL, or with a wrong direct URL, these settings may still lead to a pooler. Refuse a pooler that
    # shares its sessions among clients, because a migration needs a session that no other client uses.
    await refuse_shared_sessions(settings)
    schemas = schemas_of(kinds_of(Pipelines.from_source(settings.pipelines)))
    role = settings.database_app_role
    async with connected(settings, "migrate") as connection:
        with _refusing_unknown_revision():
            await _check_not_passed(connection, revision)
        if role is not None:
            await check_role(connection, role)
    patience = Patience(settings.migrate_lock_seconds, settings.migrate_seconds, report)
    with _refusing_unknown_revision():
        is_newer = await _migrate(settings, CORE, revision, patience)
    for schema in schemas:
        if schema is not CORE and revision == "head":
            await _migrate(settings, schema, "head", patience)
    if role is not None and not is_newer:  # for a newer schema, the newer release has already granted the rights
        async with connected(settings, "migrate") as connection:
            await grant(connection, role)


async def _check_not_passed(connection: Connection, revision: str) -> None:
    """Raises Invalid if the platform's schema has passed `revision`, and alembic's error for an unknown `revision`."""
    current = (await state_of(connection, CORE)).revision
    if current is not None and (passed := passed_revision(current, revision)) is not None:
        raise Invalid(
            "revision_passed",
            f"The schema is at {current}, past {passed}: migrations only go forward.",
        )


async def _migrate(settings: Settings, schema: Schema, revision: str, patience: Patience) -> bool:
    """Bring one schema to `revision`. Record in the audit what was applied, even if an error follows. Returns True, and
    changes nothing, if `revision` is `head` and a newer release has migrated the schema.
    """
    progress = Progress()
    url = settings.database_url.get_secret_value()
    versions = None if schema is CORE else schema.versions
    try:
        await migrate(url, revision, versions=versions, table=schema.table, patience=patience, progress=progress)
    except BaseException as error:
        with suppress(*TRY_AGAIN):  # if PostgreSQL is unreachable, the migration's own error reports it
            await _record(settings, schema, progress)
        # If alembic does not know the schema's revision, a newer release may have migrated the schema. Read the
        # revision only now, because the newer release may have done so while this migration waited.
        if isinstance(error, CommandError) and revision == "head":
            newer_revision = await _newer_revision(settings, schema)
            if newer_revision is not None:
                name = "The schema" if schema is CORE else f"The schema of {schema.name}"
                patience.report(f"{name} is at {newer_revision}, of a newer release, and stays as it is.")
                return True
        raise
    await _record(settings, schema, progress)
    return False


async def _newer_revision(settings: Settings, schema: Schema) -> str | None:
    """The revision of a schema that a newer release has migrated. None: this release has the schema's revision."""
    async with connected(settings, "migrate") as connection:
        state = await state_of(connection, schema)
    return state.revision if state.newer else None


async def _record(settings: Settings, schema: Schema, progress: Progress) -> None:
    # Records in the audit the revisions of the schema before and after the migration, if any revision was applied.
    if progress.after is None:
        return
    async with connected(settings, "migrate") as connection:
        if not await connection.fetchval("SELECT to_regclass('audit') IS NOT NULL"):
            return  # the schema is at a revision before the audit's table existed
        kind = None if schema is CORE else schema.name
        target = Target("schema", progress.after)
        await audit.record(connection, command_actor(), "schema.migrated", target, was=progress.before, kind=kind)
