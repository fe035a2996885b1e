"""The closed set of further outputs that a client may ask for. Light: the API imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VariantName = Literal["thumb", "small", "large", "avif", "png"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One declared output of the `webp` step.

    `output`: its name under the media's prefix. `max_side`: box in pixels, None for the size of `final.webp`.
    `animated`: whether an animation stays one; otherwise it is the animation's first frame.
    """

    name: VariantName
    output: str
    content_type: str
    max_side: int | None
    animated: bool


#: In the order in which they are made. No variant is ever enlarged.
VARIANTS: dict[VariantName, Variant] = {
    variant.name: variant
    for variant in (
        Variant("thumb", "variants/thumb.webp", "image/webp", 256, animated=True),
        Variant("small", "variants/small.webp", "image/webp", 640, animated=True),
        Variant("large", "variants/large.webp", "image/webp", 1600, animated=True),
        Variant("avif", "variants/full.avif", "image/avif", None, animated=False),
        Variant("png", "variants/full.png", "image/png", None, animated=False),
    )
}
