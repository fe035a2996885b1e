"""Lets the platform run its statements on connections of the user's program (asyncpg, psycopg, SQLAlchemy)."""
