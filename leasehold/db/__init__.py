"""PostgreSQL: connections, the schema, and queries that read. Statements that change a state are in
`leasehold.transitions`.
May import `domain`, `runtime`, `telemetry`.
"""
