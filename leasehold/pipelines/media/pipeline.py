"""Declares the pipeline `media` (its steps), and the `Kind` of work with the same name (its routers, scopes and stored
objects). The pipeline turns one picture into three files and the requested variants. This module imports no heavy
library, because the API imports it.

If JPEG cannot hold the picture, the step `resize` also writes a lossless master: `resize.png` for a still with
transparency, `resize.webp` for an animation. The step `webp` reads the master or, if there is none, `resize.jpg`. It
writes the variants (further files that the client asked for) and `final.webp`.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field, field_validator

from leasehold.domain.kind import Kind, Objects, Scopes
from leasehold.domain.pipeline import Limits, Pipeline, Step
from leasehold.pipelines.media.limits import PictureLimits
from leasehold.pipelines.media.variants import VARIANTS, VariantName

MIB = 1024 * 1024
#: The limits, and the time limit, of each step.
_LIMITS = Limits(memory_bytes=1536 * MIB, cpu_seconds=90, file_bytes=256 * MIB)
_TIMEOUT = timedelta(seconds=90)


class MediaParams(BaseModel):
    """The parameters of a picture. A picture of another type than `content_type` is refused as `mislabelled`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variants: tuple[VariantName, ...] = Field(default=(), description="Further outputs, each at most once.")
    max_side: int = Field(default=2048, ge=16, le=8192, description="Outputs fit into a square of this many pixels.")
    content_type: str | None = Field(
        default=None, max_length=100, description="The declared content type, to be checked."
    )
    limits: PictureLimits = PictureLimits()

    @field_validator("variants")
    @classmethod
    def _in_declared_order(cls, names: tuple[VariantName, ...]) -> tuple[VariantName, ...]:
        """Sort the variants, because the same set in another order is the same request."""
        return tuple(name for name in VARIANTS if name in names)


# An `isolated` step runs in a child process without network, within `limits`. Raise the `version` of a step if you
# change the bytes that it writes.
media = Pipeline(
    "media",
    params=MediaParams,
    inputs=("original",),
    module="leasehold.pipelines.media.steps",
    steps=[
        Step(
            "resize", reads=("original",), writes="resize.jpg", queue="media", isolated=True,
            limits=_LIMITS, timeout=_TIMEOUT, version=2,
        ),
        Step(
            "compress", needs=("resize",), reads=("resize",), writes="compress.jpg", queue="media",
            isolated=True, limits=_LIMITS, timeout=_TIMEOUT,
        ),
        Step(
            "webp", needs=("compress",), reads=("resize",), writes="final.webp", queue="media",
            isolated=True, limits=_LIMITS, timeout=_TIMEOUT, version=2,
        ),
    ],
)  # fmt: skip

MEDIA = Kind(
    "media",
    pipelines=(media,),
    routers=(
        "leasehold.api.media.uploads:router",
        "leasehold.api.media.media:router",
        "leasehold.api.media.events:router",
    ),
    # The bytes that are charged to the storage of the tenant.
    stored="SELECT coalesce(sum(size), 0) FROM media WHERE tenant_id = $1",
    # `leasehold doctor --reconcile` uses this to find out which pictures have a row, and which uploaded objects must
    # exist. The object of a job past its retention need not exist, because retention deletes objects before rows.
    objects=Objects(
        prefix="media/",
        owners="SELECT id FROM media WHERE id = ANY($1)",
        keys="SELECT m.id, m.original_key AS key FROM media m WHERE m.id > $1 AND m.job_id IS NOT NULL AND NOT EXISTS ("
        "SELECT 1 FROM job j WHERE j.id = m.job_id AND j.expires_at <= clock_timestamp()) ORDER BY m.id LIMIT $2",
    ),
    housekeeping="leasehold.pipelines.media.housekeeping:housekeeping",
    scopes=Scopes(read="media:read", write="media:write"),
)
