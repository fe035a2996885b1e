"""The limits of a picture. The API writes them from its settings into each job's parameters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class PictureLimits(BaseModel):
    """The worker checks a picture's header against these limits, before it decodes anything."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bytes: int = Field(default=32 * MIB, gt=0, description="Largest original, in bytes.")
    max_pixels: int = Field(default=50_000_000, gt=0, description="Largest width x height of one frame.")
    max_total_pixels: int = Field(
        default=200_000_000, gt=0, description="Largest width x height x frames of an animation."
    )
    max_frames: int = Field(default=300, gt=0, description="The largest number of frames of an animation.")
