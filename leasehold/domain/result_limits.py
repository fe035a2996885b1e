"""Checks the size of a result of an app's task, in the process that runs the function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from leasehold.domain.errors import Permanent

if TYPE_CHECKING:
    from leasehold.settings import Settings


@dataclass(frozen=True, slots=True)
class ResultLimits:
    """Limits of a result, in bytes of JSON. PostgreSQL keeps a result of up to `inline` bytes. The object store keeps a
    larger result, up to `longest` bytes. `store`: whether there is an object store.
    """

    inline: int
    longest: int
    store: bool

    @classmethod
    def of_settings(cls, settings: Settings) -> Self:
        return cls(settings.result_inline_bytes, settings.result_max_bytes, settings.object_store == "s3")

    @classmethod
    def default(cls) -> Self:
        """The limits by the defaults of the settings, for an attempt that no worker runs."""
        from leasehold.settings import Settings  # noqa: PLC0415 - declaring a task loads no settings

        fields = Settings.model_fields
        return cls(fields["result_inline_bytes"].default, fields["result_max_bytes"].default, store=True)

    def is_small(self, encoded: bytes) -> bool:
        """Whether the result is small enough for PostgreSQL. Raises Permanent `result_too_large` if nothing can keep
        it.
        """
        if len(encoded) > self.longest:
            sentence = f"the result has {len(encoded)} bytes of JSON; at most {self.longest} are stored"
            raise Permanent("result_too_large", sentence)
        if len(encoded) > self.inline and not self.store:
            sentence = (
                f"the result has {len(encoded)} bytes of JSON; without an object store at most {self.inline} are stored"
            )
            raise Permanent("result_too_large", sentence)
        return len(encoded) <= self.inline
