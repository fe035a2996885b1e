"""The limits of a model and its reference images. The API imports this module, because it writes the limits into each
job's parameters. So this module imports no heavy library.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class ModelLimits(BaseModel):
    """The steps check each limit as soon as they know the value that the limit bounds. They know the file's size first,
    and the tensors' shapes last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bytes: int = Field(default=500_000_000, gt=0, description="Largest model file, in bytes.")
    max_nodes: int = Field(
        default=20_000, gt=0, description="The largest number of nodes of a graph with its subgraphs."
    )
    max_tensor_bytes: int = Field(default=512 * MIB, gt=0, description="Largest single tensor, weights or not.")
    max_activation_bytes: int = Field(default=2048 * MIB, gt=0, description="Largest sum of all tensors of the graph.")
    max_image_bytes: int = Field(default=10_000_000, gt=0, description="Largest reference image, in bytes.")
    max_image_pixels: int = Field(default=50_000_000, gt=0, description="Largest width x height of one image.")
    max_images: int = Field(default=100, gt=0, description="The largest number of reference images.")
