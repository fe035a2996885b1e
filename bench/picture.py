"""Makes a picture like a camera's: its detail and noise cost every encoder time. It always has the same bytes."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageChops

from leasehold import cli

_QUALITY = 90
_NOISE = 40  # of 255, peak to peak


def photograph(width: int, height: int) -> bytes:
    """A JPEG of `width` x `height`, made from the picture of the demo."""
    with Image.open(Path(cli.__file__).with_name("picture.jpg")) as shipped:
        image = shipped.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    grain = random.Random(12).randbytes(width * height * 3)  # noqa: S311 - noise need not be secret
    noise = Image.frombytes("RGB", (width, height), grain).point(lambda value: value * _NOISE // 255)
    buffer = BytesIO()
    ImageChops.add(image, noise, offset=-_NOISE // 2).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
