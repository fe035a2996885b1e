"""Transitions move a job or a task from one state to another; see `domain.states`. Each transition is a guarded
statement, which means that it changes nothing if the row's state or lease is not as expected. Only this package writes
the status of a job or a task. This package may import `domain`, `db`, `broker`, `evaluation`, `runtime`, `telemetry`.
"""
