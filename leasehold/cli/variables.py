"""Lists the environment variables of the platform and of its kinds of work, for `leasehold settings`."""

from __future__ import annotations

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from leasehold.domain.registry import Pipelines
from leasehold.kinds.settings import settings_classes
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings


class _PipelinesAlone(BaseSettings):
    """Reads LEASEHOLD_PIPELINES only, so that the command also works while another variable has a wrong value."""

    model_config = Settings.model_config

    pipelines: str = Settings.model_fields["pipelines"].default


async def variables() -> list[tuple[str, str, str]]:
    """Name, default and meaning of each variable. Raises DeclarationError for pipelines that cannot be loaded."""
    kinds = kinds_of(Pipelines.from_source(_PipelinesAlone().pipelines))
    classes: list[type[BaseSettings]] = [Settings, *settings_classes(kinds)]
    return [
        (f"{settings.model_config.get('env_prefix', '')}{name}".upper(), default_of(field), field.description or "")
        for settings in classes
        for name, field in settings.model_fields.items()
    ]


def default_of(field: FieldInfo) -> str:
    """The default as the text of a variable. The text is empty if by default the setting has no value, or an empty
    value. The default of a secret is shown, because the published docs/reference/settings.md shows it, too.
    """
    default = field.get_default(call_default_factory=True)
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if default is None or default in ("", {}, [], ()):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)
