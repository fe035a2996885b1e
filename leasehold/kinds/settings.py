"""The hook `Kind.settings`: a kind of work reads its settings from variables with the kind's own prefix."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.kinds.loading import load


def settings_classes(kinds: Iterable[Kind]) -> list[type[BaseSettings]]:
    """The settings classes of all `kinds`, in their order."""
    return [load(kind.settings) for kind in kinds if kind.settings is not None]


def check_settings(kinds: Iterable[Kind]) -> None:
    """Check the settings of all `kinds` when a process starts.

    Raises DeclarationError for an invalid variable. The message names the variable, and never its value.
    """
    for settings in settings_classes(kinds):
        try:
            settings()
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            name = f"{settings.model_config.get('env_prefix', '')}{first['loc'][0] if first['loc'] else ''}".upper()
            raise DeclarationError(f"{name}: {first['msg']}") from None
