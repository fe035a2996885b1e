"""`leasehold migrate`: brings the schemas up to date, and grants the platform's role its rights."""

from __future__ import annotations

from leasehold.db.database import connect, migrate
from leasehold.db.roles import grant
from leasehold.db.schemas import CORE
from leasehold.domain.registry import Pipelines
from leasehold.kinds.schemas import schemas_of
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings


async def upgrade(settings: Settings, revision: str) -> None:
    """Bring the platform's schema to `revision`. With `head`, bring the schemas of all kinds of work up to date, too.

    Raises DeclarationError for an unknown kind, before any change. Raises Invalid when the role `database_app_role`
    does not exist, or could change the schema all the same.
    """
    url = settings.database_url.get_secret_value()
    schemas = schemas_of(kinds_of(Pipelines.from_source(settings.pipelines)))
    await migrate(url, revision)
    for schema in schemas:
        if schema is not CORE and revision == "head":
            await migrate(url, versions=schema.versions, table=schema.table)
    if settings.database_app_role is None:
        return
    connection = await connect(settings, "migrate")
    try:
        await grant(connection, settings.database_app_role)
    finally:
        await connection.close()
