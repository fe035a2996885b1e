"""Transitions move a job or a task from one state to another, each by a guarded statement; see `domain.states`. This
room alone writes a status. It may import `domain`, `db`, `broker`, `runtime`, `telemetry`.
"""
