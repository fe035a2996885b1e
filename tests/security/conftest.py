"""The parts that attacks are tried on: those of the API's tests."""

from __future__ import annotations

from tests.api.conftest import api, door, make_key, rows

__all__ = ["api", "door", "make_key", "rows"]
