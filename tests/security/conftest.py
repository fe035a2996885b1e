"""The parts that attacks are tried on: those of the API's tests."""

from __future__ import annotations

from tests.api.conftest import api, make_key, media_api

__all__ = ["api", "make_key", "media_api"]
