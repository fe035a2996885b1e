"""A library that cannot be loaded."""

from __future__ import annotations

raise RuntimeError("no such processor")
