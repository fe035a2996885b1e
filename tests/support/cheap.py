"""What thousands of tests repeat, made cheap in the process of the tests."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, cast

import botocore.hooks
import httpcore2
import structlog

from leasehold.domain import registry

if TYPE_CHECKING:
    import ssl

#: Python's own is 700: with it, a twentieth of the tests' CPU time goes to the garbage collector.
_OBJECTS_BEFORE_COLLECTION = 20_000


def make_repetitions_cheap() -> None:
    """Share the certificate authorities, the list of installed packages and the names of botocore's events, log
    tracebacks plainly, and collect garbage less often.
    """
    httpcore2.default_ssl_context = _authorities
    vars(registry)["entry_points"] = _installed  # a name that it imports
    botocore.hooks.EventAliaser.__init__ = _share_names  # type: ignore[method-assign, assignment]  # as intended
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback  # Rich's takes 0.1 s
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, *gc.get_threshold()[1:])


_make_context = httpcore2.default_ssl_context


def _authorities(*, _trust_env: bool = True) -> ssl.SSLContext:
    """The context of each HTTP client without one of its own: to read all authorities takes 30 ms."""
    chosen = (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")) if _trust_env else None
    return _made(chosen)


@cache
def _made(chosen: tuple[str | None, ...] | None) -> ssl.SSLContext:
    return _make_context(_trust_env=chosen is not None)


_make_aliaser = botocore.hooks.EventAliaser.__init__
_names_of_events: dict[str, str] = {}


def _share_names(aliaser: botocore.hooks.EventAliaser, emitter: Any, aliases: Any = None) -> None:
    """Each client of S3 registers some hundred handlers, and translates the names of their events, which takes 7 ms."""
    _make_aliaser(aliaser, emitter, aliases)
    if aliases is None:
        vars(aliaser)["_alias_name_cache"] = _names_of_events


def _installed(**wanted: Any) -> EntryPoints:
    """The entry points of each API and worker in this process: to read those of 220 packages takes 6 ms."""
    return _read(tuple(sys.path), **wanted)


@cache
def _read(_path: tuple[str, ...], **wanted: Any) -> EntryPoints:
    return cast("EntryPoints", entry_points(**wanted))
