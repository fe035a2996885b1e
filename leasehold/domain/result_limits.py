"""Checks the size of a result of a task function, in the process that runs the function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from leasehold.domain.errors import Permanent

if TYPE_CHECKING:
    from leasehold.settings import Settings


@dataclass(frozen=True, slots=True)
class ResultLimits:
    """Limits of a result, in bytes of JSON. PostgreSQL keeps a result of up to `inline_bytes`. The object store keeps a
    larger result, up to `max_bytes`. `has_store`: whether there is an object store.
    """

    inline_bytes: int
    max_bytes: int
    has_store: bool

    @classmethod
    def of_settings(cls, settings: Settings) -> Self:
        return cls(settings.result_inline_bytes, settings.result_max_bytes, settings.object_store == "s3")

    @classmethod
    def default(cls) -> Self:
        """The limits that the settings have by default, for an attempt outside a worker."""
        from leasehold.settings import Settings  # noqa: PLC0415 - a program that only declares tasks loads no settings

        fields = Settings.model_fields
        return cls(fields["result_inline_bytes"].default, fields["result_max_bytes"].default, has_store=True)

    def is_small(self, encoded: bytes) -> bool:
        """Whether the result is small enough for PostgreSQL. A larger result goes to the object store. Raises Permanent
        `result_too_large` if there is no store, or if the result is too large for the store.
        """
        size = len(encoded)
        if size > self.max_bytes:
            sentence = f"the result has {size} bytes of JSON; at most {self.max_bytes} are stored"
            raise Permanent("result_too_large", sentence)
        if size > self.inline_bytes and not self.has_store:
            sentence = (
                f"the result has {size} bytes of JSON; without an object store at most {self.inline_bytes} are stored"
            )
            raise Permanent("result_too_large", sentence)
        return size <= self.inline_bytes
