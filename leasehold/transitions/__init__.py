"""Every move of a job or a task from one state to another, each one guarded statement; see `domain.states`.
May import `domain`, `db`, `broker`, `runtime`, `telemetry`. Nothing else writes a status.
"""
