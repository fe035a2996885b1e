"""Lists the variables of the platform and of its kinds of work, for `leasehold settings`."""

from __future__ import annotations

from pydantic_settings import BaseSettings

from leasehold.domain.registry import Pipelines
from leasehold.kinds.settings import settings_classes
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings


async def variables() -> list[tuple[str, str, str]]:
    """Name, default and meaning of each variable. Raises DeclarationError for pipelines that cannot be loaded."""
    kinds = kinds_of(Pipelines.from_source(Settings().pipelines))
    classes: list[type[BaseSettings]] = [Settings, *settings_classes(kinds)]
    return [
        (f"{settings.model_config.get('env_prefix', '')}{name}".upper(), str(field.default), field.description or "")
        for settings in classes
        for name, field in settings.model_fields.items()
    ]
