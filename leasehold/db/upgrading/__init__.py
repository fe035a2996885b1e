"""What `leasehold migrate` will do, and how its revisions stay safe beside a running installation: the statements of
pending revisions, the locks that each takes, and index builds that survive their own death. Only migrations and the
command line load it, because it loads alembic and SQLAlchemy.
"""
