"""Reads and checks the settings when a process starts. Programs, commands and apps get their settings from here.

A wrong variable ends the start with one sentence, without a traceback. The sentence names the variable. It shows no
secret, and no URL, because a URL may contain a secret.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError
from pydantic_settings import SettingsError

from leasehold.domain.errors import BadSetting
from leasehold.settings import Settings
from leasehold.urls import check_urls

#: Finds the name of the setting in the text of a SettingsError, because this error has no attribute for the name.
_SETTING = re.compile(r'field "(\w+)"')
#: The end of the sentence of each BadSetting that this module raises.
_ADVICE = "; `leasehold settings` lists all variables"


def read_settings(env_file: str | None = ".env") -> Settings:
    """The settings of the environment and of `env_file`. Raises BadSetting for a wrong variable or URL."""
    settings = parse_settings(env_file)
    check_urls(settings)
    return settings


def parse_settings(env_file: str | None = ".env") -> Settings:
    """Read the settings without checking URLs. Use this for a command that replaces the servers in the settings."""
    with wrong_variables_named():
        return Settings(_env_file=env_file)


@contextmanager
def wrong_variables_named() -> Iterator[None]:
    """Use this around code that makes the settings. It turns Pydantic's errors about a variable into BadSetting."""
    try:
        yield
    except ValidationError as error:
        raise _bad_setting(error) from None
    except SettingsError as error:
        setting = _SETTING.search(str(error))
        name = "a variable" if setting is None else _variable_of(setting[1])
        raise BadSetting(name, f"the value is not JSON{_ADVICE}") from None


def settings_or_exit() -> Settings:
    """Call `read_settings` for a program. A wrong setting ends the process with the sentence of the error."""
    try:
        return read_settings()
    except BadSetting as error:
        sys.exit(f"leasehold: {error}")


def _bad_setting(error: ValidationError) -> BadSetting:
    """The error that names every wrong variable with its reason."""
    problems = [
        (_variable_of(str(problem["loc"][0])) if problem["loc"] else "the settings", problem["msg"])
        for problem in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    (name, reason), *others = problems
    return BadSetting(name, "; ".join([reason, *(f"{other}: {why}" for other, why in others)]) + _ADVICE)


def _variable_of(setting: str) -> str:
    return f"LEASEHOLD_{setting}".upper()
