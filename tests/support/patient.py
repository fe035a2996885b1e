"""Hypothesis on a busy machine, where an example may take seconds because a process stands still."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

#: By default an example that takes a fifth of a second is a failure, and so are examples that are drawn slowly.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
