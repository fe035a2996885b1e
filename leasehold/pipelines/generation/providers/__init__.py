"""The providers (services that make images or videos): four built-in providers, and the providers that the settings
declare.

The endpoints read the `Catalogue` (what the settings say about each provider). The steps of a worker use `Providers`
(the clients of the providers). A provider's kind is `image` or `video`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import SecretStr

from leasehold.domain.errors import DeclarationError
from leasehold.pipelines.generation.provider import Kind, NoAccess, Provider
from leasehold.pipelines.generation.providers.ark import Ark
from leasehold.pipelines.generation.providers.declared import Declaration, Declared, declarations
from leasehold.pipelines.generation.providers.fal import Fal
from leasehold.pipelines.generation.providers.jimeng import Jimeng
from leasehold.pipelines.generation.providers.redaction import without_secrets
from leasehold.pipelines.generation.providers.replicate import Replicate
from leasehold.pipelines.generation.providers.requests import RequestSender
from leasehold.settings import Settings

BUILT_IN = ("jimeng", "ark", "replicate", "fal")
#: The pairs (built-in provider, kind) for which the answer to an order already has the files. The provider has no
#: request that finds such an order again.
_ANSWERED_WITH_FILES = frozenset({("ark", "image")})


@dataclass(frozen=True, slots=True)
class ProviderTerms:
    """What the settings define for a provider. `at_most`: how many generations of all tenants together may be under way
    at once; None: the settings set no bound.
    """

    name: str
    has_credential: bool
    at_most: int | None


class Catalogue:
    """The providers by name, as the settings define them. Raises DeclarationError for invalid settings."""

    def __init__(self, settings: Settings) -> None:
        self.declared: Mapping[str, Declaration] = _by_name(declarations(settings.generation_http_providers))
        self._credentials = settings.generation_credentials
        self._limits = settings.generation_limits
        self.default = settings.generation_provider or None
        named_providers = {*self._credentials, *self._limits, *([self.default] if self.default else [])}
        if unknown := named_providers - {*BUILT_IN, *self.declared}:
            raise DeclarationError(f"settings of generation name unknown providers: {', '.join(sorted(unknown))}")

    def find(self, name: str) -> ProviderTerms | None:
        """The terms of the provider. Returns None if the installation has no such provider."""
        if name not in BUILT_IN and name not in self.declared:
            return None
        return ProviderTerms(name, name in self._credentials, self._limits.get(name))

    def credential(self, name: str) -> SecretStr | None:
        """The installation's own credential for a provider, if there is one."""
        return self._credentials.get(name)

    def has_poll(self, name: str, kind: Kind) -> bool:
        """Whether the provider can be asked for an order of this kind by the order's id. True for a provider that the
        installation no longer has, because the settings may declare it again.
        """
        declaration = self.declared.get(name)
        return (name, kind) not in _ANSWERED_WITH_FILES if declaration is None else declaration.poll is not None


@asynccontextmanager
async def open_catalogue(settings: Settings) -> AsyncIterator[Catalogue]:
    """Open the catalogue for the endpoints. The kind of work `generation` names this function as its hook `opens`."""
    yield Catalogue(settings)


def _by_name(provider_declarations: list[Declaration]) -> dict[str, Declaration]:
    names = [declaration.name for declaration in provider_declarations]
    if used_twice := {name for name in names if names.count(name) > 1 or name in BUILT_IN}:
        raise DeclarationError(f"generation_http_providers: names used twice: {', '.join(sorted(used_twice))}")
    return dict(zip(names, provider_declarations, strict=True))


class Providers:
    """The clients of the providers, by name. They share one open RequestSender."""

    def __init__(self, catalogue: Catalogue, opened: Mapping[str, Provider]) -> None:
        self.catalogue = catalogue
        self._opened = opened

    def __getitem__(self, name: str) -> Provider:
        """Raises NoAccess `unknown_provider`."""
        try:
            return self._opened[name]
        except KeyError:
            raise NoAccess("unknown_provider", f"This installation has no provider {name!r}.") from None


@asynccontextmanager
async def open_providers(settings: Settings) -> AsyncIterator[Providers]:
    catalogue = Catalogue(settings)
    async with RequestSender.opened(settings) as sender:
        provider_by_name: dict[str, Provider] = {
            "jimeng": Jimeng(sender, settings.generation_jimeng_url),
            "ark": Ark(sender, settings.generation_ark_url),
            "replicate": Replicate(sender, settings.generation_replicate_url),
            "fal": Fal(sender, settings.generation_fal_url),
        }
        provider_by_name |= {name: Declared(sender, declaration) for name, declaration in catalogue.declared.items()}
        yield Providers(catalogue, {name: without_secrets(provider) for name, provider in provider_by_name.items()})
