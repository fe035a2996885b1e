"""PostgreSQL: connections, the schema, and queries that read. Statements that change a state are in
`leasehold.transitions`.

This package may import `domain`, `runtime` and `telemetry`.
"""
