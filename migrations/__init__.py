"""The revisions of the database schema, which Alembic runs. The package is imported as `leasehold.migrations`."""
