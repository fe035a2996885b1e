"""PostgreSQL: connections, the schema, and queries that read. What moves a state is in `leasehold.transitions`.
May import `domain`, `runtime`, `telemetry`.
"""
