"""Transitions move a job or a task from one state to another; see `domain.states`. Each transition is a guarded
statement: it changes nothing if the row's state or lease is not as expected. Only this package writes a status. It may
import `domain`, `db`, `broker`, `evaluation`, `runtime`, `telemetry`.
"""
