"""Plans migrations and runs them safely beside a running installation. This package renders the statements of pending
revisions, and computes the locks that each statement takes. It runs a revision again if a lock was not free. It builds
indexes so that an interrupted build can be repeated. Only migrations and the command line import this package, because
it imports alembic and SQLAlchemy.
"""
