"""Plans migrations and runs them safely beside a running installation. It renders the statements of pending revisions,
computes the locks that each statement takes, runs a revision again if a lock was not free, and builds indexes so that
an interrupted build can be repeated. Only migrations and the command line import this package, because it imports
alembic and SQLAlchemy.
"""
