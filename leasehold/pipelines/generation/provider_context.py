"""The provider context, which all generation attempts of one worker use. The context has the providers (services that
make images or videos), an HTTP client that never connects to private addresses, and the keys that seal (encrypt)
clients' credentials.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from leasehold.domain.errors import LeaseholdError
from leasehold.pipelines.generation.callbacks import callback_url
from leasehold.pipelines.generation.metrics import measured
from leasehold.pipelines.generation.pipeline import GenerationParams
from leasehold.pipelines.generation.provider import NoAccess, Order, Provider, SourceImage
from leasehold.pipelines.generation.providers import Providers, open_providers
from leasehold.security.egress import Egress
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings


@dataclass(frozen=True, slots=True)
class ProviderContext:
    """`egress`: the HTTP client that downloads files. `sealing`: decrypts sealed credentials."""

    settings: Settings
    providers: Providers
    egress: Egress
    sealing: Sealing

    def access(self, params: GenerationParams) -> tuple[Provider, str]:
        """The provider of the order, and the client's credential. If the client sent no credential, the installation's
        credential takes its place.

        Raises NoAccess `unknown_provider` (the installation no longer has this provider), `credential_unreadable` or
        `credential_missing`.
        """
        # `measured` counts and times the requests to the provider.
        return measured(self.providers[params.provider]), self._credential(params)

    def _credential(self, params: GenerationParams) -> str:
        if params.credential is not None:
            try:
                return self.sealing.open(params.credential.encode()).decode()
            except LeaseholdError:
                raise NoAccess(
                    "credential_unreadable", "The credential was sealed with a key that is no longer configured."
                ) from None
        own_credential = self.providers.catalogue.credential(params.provider)
        if own_credential is None:
            raise NoAccess("credential_missing", f"There is no credential for {params.provider}.")
        return own_credential.get_secret_value()

    def callback(self, job_id: UUID) -> str | None:
        """The address that the provider may call when the state of the job's order changes. A sealing key signs the
        address. Returns None if the installation has no public URL, or no key to sign with.
        """
        return callback_url(self.settings, self.sealing, job_id)


@asynccontextmanager
async def open_provider_context(settings: Settings) -> AsyncIterator[ProviderContext]:
    async with open_providers(settings) as providers, Egress.from_settings(settings) as egress:
        yield ProviderContext(settings, providers, egress, Sealing(settings))


def order_of(params: GenerationParams, job_id: UUID, seconds_left: float) -> Order:
    """The order of a job. The idempotency token is the job's id, because every attempt must send the same token.
    `sample_strength` and `is_pro` are passed on unchanged, because each provider interprets them in its own way.
    """
    return Order(
        kind=params.kind,
        token=str(job_id),
        prompt=params.prompt,
        model=params.model,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        sample_strength=params.sample_strength,
        images=tuple(SourceImage(image.url, image.width, image.height) for image in params.images),
        is_pro=params.is_pro,
        duration_ms=params.duration,
        ratio=params.ratio,
        deadline_seconds=max(int(seconds_left), 1),
        extra=params.extra,
    )
