"""Tells apart the errors that Pillow raises while it decodes. The cause may be a damaged picture, a picture with too
many pixels, a lack of memory, or an error of the system. The module also sets Pillow's pixel limit. The media steps use
this module, and conversions use it for their reference images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image

from leasehold.domain.errors import Permanent, StepError


@contextmanager
def pillow_limits(max_pixels: int) -> Iterator[None]:
    """During the block, set Pillow's own pixel limit, and raise Pillow's warning about a larger picture as an error.
    Without this, Pillow refuses a picture only if it has more than two times the limit.

    All other warnings are hidden, because they concern metadata that nobody reads.
    """
    earlier_limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    finally:
        Image.MAX_IMAGE_PIXELS = earlier_limit


@contextmanager
def damage_is_permanent(damaged: Callable[[], Permanent], too_many_pixels: Callable[[], Permanent]) -> Iterator[None]:
    """Raise a decoder's errors as `damaged()`, because a damaged file can make a decoder raise any error, such as
    IndexError. Raise Pillow's refusal of the size as `too_many_pixels()`.

    Errors that the platform itself raised (StepError) pass unchanged. A lack of memory and errors of the system (which
    have an errno) pass unchanged, too, because they are not faults of the picture.
    """
    try:
        yield
    except (StepError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_many_pixels() from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if "out of memory" in str(error).lower():  # Pillow's decoders raise an OSError for a lack of memory
            raise MemoryError(str(error)) from error
        raise damaged() from error
