"""Adapts connections of the user's program (asyncpg, psycopg, SQLAlchemy) to the platform's statements."""
