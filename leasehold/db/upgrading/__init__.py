"""Plans migrations and runs them safely beside a running installation. It renders the statements of pending revisions,
computes the locks that each takes, tries again when a lock is not free, and builds indexes repeatably.
Only migrations and the command line import it, because it imports alembic and SQLAlchemy.
"""
