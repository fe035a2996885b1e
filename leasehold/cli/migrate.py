"""`leasehold migrate` plans a migration, brings the schemas up to date, and grants the platform's role its rights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alembic.script.revision import RevisionError
from alembic.util import CommandError

from leasehold.cli.running import command_actor
from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import connected, migrate
from leasehold.db.poolers import refuse_shared_sessions
from leasehold.db.roles import grant
from leasehold.db.schemas import CORE, state_of
from leasehold.db.upgrading.patience import Patience
from leasehold.db.upgrading.plan import Plan, plan_of
from leasehold.domain.errors import Invalid
from leasehold.domain.registry import Pipelines
from leasehold.kinds.schemas import schemas_of
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings


async def planned(settings: Settings, revision: str) -> Plan:
    """What `upgrade` would do. Nothing is changed. Raises Invalid for an unknown revision."""
    settings = settings.direct()
    schemas = schemas_of(kinds_of(Pipelines.from_source(settings.pipelines)))
    async with connected(settings, "migrate") as connection:
        with _known_revision():
            return await plan_of(connection, schemas, revision)


@contextmanager
def _known_revision() -> Iterator[None]:
    try:
        yield
    except (CommandError, RevisionError) as error:
        raise Invalid("unknown_revision", f"{error}.") from None


async def upgrade(settings: Settings, revision: str, waiting: Callable[[str], None] = lambda _: None) -> None:
    """Bring the platform's schema to `revision`. With `head`, bring the schemas of all kinds of work up to date, too.

    `waiting` gets a sentence when the migration waits for somebody.

    Raises DeclarationError for an unknown kind, before any change. Raises Invalid for an unknown revision, and when the
    role `database_app_role` does not exist, or could change the schema all the same. Raises SchemaLocked.
    """
    settings = settings.direct()
    await refuse_shared_sessions(settings)
    url = settings.database_url.get_secret_value()
    schemas = schemas_of(kinds_of(Pipelines.from_source(settings.pipelines)))
    async with connected(settings, "migrate") as connection:
        before = (await state_of(connection, CORE)).revision
    patience = Patience(settings.migrate_lock_seconds, settings.migrate_seconds, waiting)
    with _known_revision():
        await migrate(url, revision, patience=patience)
    for schema in schemas:
        if schema is not CORE and revision == "head":
            await migrate(url, versions=schema.versions, table=schema.table, patience=patience)
    async with connected(settings, "migrate") as connection:
        if settings.database_app_role is not None:
            await grant(connection, settings.database_app_role)
        after = (await state_of(connection, CORE)).revision
        if (
            after != before
            and after is not None
            and await connection.fetchval("SELECT to_regclass('audit') IS NOT NULL")
        ):
            await audit.record(connection, command_actor(), "schema.migrated", Target("schema", after), was=before)
