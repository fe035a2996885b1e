"""The variants that a client may request in addition to the final picture. The API imports this module, so this module
imports no heavy library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VariantName = Literal["thumb", "small", "large", "avif", "png"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One output of the `webp` step that a client may request.

    `output`: the name of its file under the picture's prefix. `max_side`: the longer side of the variant has at most
    this many pixels; None: the variant is as large as the final picture. Of an animation, a WebP variant has all
    frames, and any other variant only the first frame.
    """

    name: VariantName
    output: str
    content_type: str
    max_side: int | None


#: The variants, in the order in which the step writes them. No variant is larger than the original.
VARIANTS: dict[VariantName, Variant] = {
    variant.name: variant
    for variant in (
        Variant("thumb", "variants/thumb.webp", "image/webp", 256),
        Variant("small", "variants/small.webp", "image/webp", 640),
        Variant("large", "variants/large.webp", "image/webp", 1600),
        Variant("avif", "variants/full.avif", "image/avif", None),
        Variant("png", "variants/full.png", "image/png", None),
    )
}
