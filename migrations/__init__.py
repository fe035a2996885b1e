"""The schema's revisions, imported as `leasehold.migrations`; Alembic runs them."""
