"""How large a model, and what is sent with it, may be. Light: the API writes these into each job's parameters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class ModelLimits(BaseModel):
    """Checked in the order in which they become known: the file's size first, shapes last."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bytes: int = Field(default=500_000_000, gt=0, description="Largest model file, in bytes.")
    max_nodes: int = Field(default=20_000, gt=0, description="Most nodes of a graph, its subgraphs included.")
    max_tensor_bytes: int = Field(default=512 * MIB, gt=0, description="Largest single tensor, weights or not.")
    max_activation_bytes: int = Field(default=2048 * MIB, gt=0, description="All the graph's tensors together.")
    max_image_bytes: int = Field(default=10_000_000, gt=0, description="Largest reference image, in bytes.")
    max_image_pixels: int = Field(default=50_000_000, gt=0, description="Largest width x height of one image.")
    max_images: int = Field(default=100, gt=0, description="Most reference images.")
