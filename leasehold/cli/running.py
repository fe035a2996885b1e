"""Parts of every command: the settings of the environment, and errors as one sentence on the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer
from rich.console import Console

from leasehold.domain.errors import LeaseholdError
from leasehold.settings import Settings

_T = TypeVar("_T")


def environment() -> Settings:
    """The settings of the environment. A wrong one ends the command with a sentence."""
    from leasehold.urls import refuse_bad_urls  # noqa: PLC0415 - each command loads only what it needs

    settings = Settings()
    refuse_bad_urls(settings)
    return settings


def run_or_exit(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a command's coroutine. An error of the platform, or a silent server, ends the command with a sentence."""
    from leasehold.runtime.transient import TRY_AGAIN  # noqa: PLC0415 - each command loads only what it needs

    expected: tuple[type[BaseException], ...] = (LeaseholdError, ExceptionGroup, *TRY_AGAIN)
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except expected as error:
        sentence = str(error) or type(error).__name__
        Console(stderr=True).print(f"leasehold: {sentence}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None
