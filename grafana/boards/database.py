"""PostgreSQL: what makes it slow before it is slow."""

from __future__ import annotations

from grafana.describe import Board, Panel, Row, Variable, exported, quantile

_T = 'table=~"$table"'

BOARD = Board(
    "leasehold-database",
    "Database",
    "What makes PostgreSQL slow, before it is slow.",
    [
        Row("Bloat", [
            Panel("Dead rows", "Vacuum has not taken them away yet. Over 20,000 in `task`, claims slow down.", {"{{table}}": exported("leasehold_table_rows", "table", f'kind="dead", {_T}')}, warn=20_000),
            Panel("Live rows", "PostgreSQL's estimate.", {"{{table}}": exported("leasehold_table_rows", "table", f'kind="live", {_T}')}),
            Panel("Size", "With indexes.", {"{{table}}": exported("leasehold_table_bytes", "table", _T)}, "bytes"),
            Panel("Size of the database", "Everything.", {"bytes": exported("leasehold_database_bytes")}, "bytes"),
            Panel("Lateness of retention", "How long the job that expired first could have been deleted. Growing: more jobs expire than retention deletes.", {"late": exported("leasehold_retention_oldest_due_seconds")}, "s", warn=600, bad=3600),
        ]),
        Row("What keeps vacuum from its work", [
            Panel("Oldest snapshot", "Dead rows younger than this stay: for a transaction that is open or prepared, a standby, or a slot.", {"age": exported("leasehold_database_snapshot_oldest_seconds")}, "s", warn=10, bad=60),
            Panel("The same in transactions", "xmin's age.", {"transactions": exported("leasehold_database_snapshot_age_transactions")}),
        ]),
        Row("Statements", [
            Panel("Under way for over a second", "Slow statements now, by the name in their first line: search for it in the code, and in PostgreSQL's log and views.", {"{{statement}}": exported("leasehold_database_slow_statements", "statement")}, warn=1, bad=5),
            Panel("Longest under way", "Any statement in this database.", {"age": exported("leasehold_database_statement_oldest_seconds")}, "s", warn=1, bad=10),
            Panel("Ours, p99", "Round trips of the workers' statements.", {"{{statement}}": quantile(0.99, "leasehold_statement_duration_seconds", "statement")}, "s"),
            Panel("The exporter's own queries, p99", "All statements behind these numbers together.", {"queries": quantile(0.99, "leasehold_exporter_look_duration_seconds")}, "s", warn=0.5),
        ]),
        Row("Read replica", [
            Panel("Reads from the standby are at most so old", "By API process. It grows while the standby is away.", {"{{instance}}": 'leasehold_replica_lag_seconds{part="requests"}'}, "s", warn=10, bad=60),
            Panel("Reads go to the standby", "1: to the standby; 0: it is away or too far behind, and the primary carries them.", {"{{instance}}": 'leasehold_replica_serves{part="requests"}'}, bad=1, low_is_bad=True),
            Panel("Reads that may be stale", "By the server that answered. repeated: the standby failed during the read; fresh: the client wanted no stale answer.", {"{{part}}, {{server}}": "sum by (part, server) (rate(leasehold_replica_reads_total[$__rate_interval]))"}, "ops"),
        ]),
        Row("Sessions", [
            Panel("By state", "idle in transaction is what holds snapshots.", {"{{state}}": exported("leasehold_database_sessions", "state"), "allowed": exported("leasehold_database_sessions_max")}),
            Panel("Contact", "1 while a process's last contact was good.", {"{{instance}}": "leasehold_database_up"}, bad=1, low_is_bad=True),
            Panel("Connects of the heartbeats", "Each is a connection that was lost before, but for the first.", {"{{instance}}": "increase(leasehold_database_connects_total[$__rate_interval])"}),
        ]),
    ],
    [Variable("table", "leasehold_table_bytes", "table")],
)  # fmt: skip
