"""Functions for all commands: read the settings, run a coroutine, and print an error as one sentence."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer
from rich.console import Console

from leasehold.cli.terminal import harmless, print_line
from leasehold.domain.audit import Actor
from leasehold.domain.errors import BadSetting, BrokerUnavailable, CodeBroken, LeaseholdError, StoreUnavailable
from leasehold.settings import Settings, as_variables, servers_of_database

_T = TypeVar("_T")  # the result of a command's coroutine

# Exit statuses.
#: The action failed or was refused.
FAILED = 1
#: The command was used wrongly. typer exits with the same status.
WRONG_USE = 2
#: A server does not answer, or cannot answer now. The command may be tried again.
UNREACHABLE = 3
#: The user's own module raised an error when it was imported.
BROKEN_CODE = CodeBroken.exit_status


def environment(env_file: str | None = ".env") -> Settings:
    """The settings of the environment, and of `env_file`. For a wrong setting, the command prints an error and ends."""
    from leasehold.starting import read_settings  # noqa: PLC0415 - each command loads only what it needs

    try:
        return read_settings(env_file)
    except BadSetting as error:
        raise failure_printed(str(error), WRONG_USE) from None


def join_dev() -> None:
    """If a `leasehold dev` runs in the current folder, let this process use its servers. Do nothing if the environment
    or the folder's `.env` names a database.
    """
    from leasehold.app.dev_file import dev_variables  # noqa: PLC0415 - each command loads only what it needs

    variables = dev_variables()
    if not variables:
        return
    set_by_user = environment().model_fields_set
    if "database_url" in set_by_user:
        return
    # The user's variables stay, except those that name the database's servers. All other variables come from the
    # `leasehold dev`.
    kept = as_variables(dict.fromkeys(set_by_user - servers_of_database("").keys(), ""))
    taken = {name: value for name, value in variables.items() if name not in kept}
    for name in taken:
        os.environ.pop(f"{name}_FILE", None)  # a setting must not have both a value and a file
    os.environ.update(taken)
    print_line("leasehold: joins the `leasehold dev` of this folder", to=Console(stderr=True))


def environment_or_dev() -> Settings:
    """Call `join_dev`, and then return the settings of the environment."""
    join_dev()
    return environment()


def use_source(source: str | None) -> None:
    """Let this process and its child processes serve the pipelines of `source`, an argument of the command. For a
    source that cannot be loaded, the command prints an error and ends.
    """
    if source is None:
        return
    from leasehold.domain.registry import Pipelines  # noqa: PLC0415 - each command loads only what it needs

    module, _, name = source.partition(":")
    module = module.removeprefix("./").removesuffix(".py")
    os.environ["LEASEHOLD_PIPELINES"] = f"{module.replace('/', '.')}:{name or 'app'}"
    try:
        Pipelines.from_source(os.environ["LEASEHOLD_PIPELINES"])
    except LeaseholdError as error:
        raise _failure_of(error, FAILED) from None


def _failure_of(error: BaseException, status: int) -> typer.Exit:
    """Print the error. Returns the exception that ends the command."""
    if not isinstance(error, CodeBroken):
        return failure_printed(_sentence_of(error), status)
    typer.echo(harmless(error.trace), err=True)
    return failure_printed(str(error), BROKEN_CODE)


def failure_printed(sentence: str, status: int = FAILED) -> typer.Exit:
    """Print the sentence to stderr. Returns the exception that ends the command: `raise failure_printed(...)`."""
    print_line(f"leasehold: {sentence}", "red", to=Console(stderr=True))
    return typer.Exit(status)


def command_actor() -> Actor:
    """The actor that the audit names for a command that works directly in the database. This is the user of the
    machine.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"uid {os.getuid()}"
    return Actor("command", f"{user}@{socket.gethostname()}")


def run_or_exit(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a command's coroutine. For an error of the platform, or a server that does not answer, the command prints an
    error and ends.
    """
    from leasehold.runtime.transient import TRY_AGAIN  # noqa: PLC0415 - each command loads only what it needs

    expected_errors: tuple[type[BaseException], ...] = (LeaseholdError, ExceptionGroup, *TRY_AGAIN)
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None  # the status with which a shell reports a program that SIGINT ended
    except expected_errors as error:
        is_unreachable = isinstance(error, (*TRY_AGAIN, StoreUnavailable, BrokerUnavailable))
        raise _failure_of(error, UNREACHABLE if is_unreachable else FAILED) from None


def _sentence_of(error: BaseException) -> str:
    """The error as text. For a group: the texts of its errors, because the group's own text only counts them. The text
    of a failed connection gets a prefix, because Python's text does not mention the server.
    """
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_sentence_of, error.exceptions))
    text = str(error) or type(error).__name__
    return f"a server does not answer: {text}" if isinstance(error, (ConnectionError, TimeoutError)) else text
