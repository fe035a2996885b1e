"""The media pipeline: one picture in, three pictures out. Light: the API imports it."""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, ConfigDict

from leasehold.pipeline import Limits, Pipeline, Step

MIB = 1024 * 1024
_LIMITS = Limits(memory_bytes=1536 * MIB, cpu_seconds=90, file_bytes=256 * MIB)
_TIMEOUT = timedelta(seconds=90)


class MediaParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


media = Pipeline(
    "media",
    params=MediaParams,
    inputs=("original",),
    module="pipelines.media.steps",
    steps=[
        Step(
            "resize", reads=("original",), writes="resize.jpg", queue="media", isolated=True,
            limits=_LIMITS, timeout=_TIMEOUT,
        ),
        Step(
            "compress", needs=("resize",), reads=("resize",), writes="compress.jpg", queue="media",
            isolated=True, limits=_LIMITS, timeout=_TIMEOUT,
        ),
        Step(
            "webp", needs=("compress",), reads=("resize",), writes="final.webp", queue="media",
            isolated=True, limits=_LIMITS, timeout=_TIMEOUT,
        ),
    ],
)  # fmt: skip
