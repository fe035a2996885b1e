"""Makes the inputs with which both toolchains (our own, and the vendor Kneron's) calibrate a model and compare its
versions. The inputs come from the client's reference images. If there are no images, the inputs are random numbers.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from leasehold.pictures.damage import damage_is_permanent, pillow_limits
from leasehold.pictures.grey16 import is_grey16, to_8_bits
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.pipeline import Preprocessing
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.running import Tensors, random_tensors

#: The number of random samples that are made if there are no reference images.
_GENERATED_SAMPLES = 16
#: At most this many bytes of samples stay in memory. (For an input of 3 x 640 x 640, the samples of 100 images fit.)
#: Each pass over the samples makes the remaining samples again.
_KEPT_BYTES = 512 * 1024 * 1024
#: The accepted formats of reference images, by Pillow's names.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_COLOUR_CHANNELS = 3


class Samples:
    """Yields samples (values for the model's inputs) one after the other, because all samples together may need more
    memory than a step has. The first `_KEPT_BYTES` of samples stay in memory. Each pass makes the remaining samples
    again.

    `origin`: "reference images" or "generated".
    """

    def __init__(self, make: Callable[[int], Iterator[Tensors]], origin: str) -> None:
        """`make(first)` yields the samples from number `first` on. Every call must yield the same samples. The
        constructor makes all samples once, so it raises every error of `make`.
        """
        self.origin = origin
        self._make = make
        self._kept: list[Tensors] = []
        self._count, room = 0, _KEPT_BYTES
        for sample in make(0):
            self._count += 1
            room -= sum(values.nbytes for values in sample.values())
            if room >= 0:  # all samples have the same size, so if one does not fit, no later one fits
                self._kept.append(sample)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensors]:
        yield from self._kept
        if len(self._kept) < self._count:
            yield from self._make(len(self._kept))


def samples(
    archive: Path, model_inputs: list[dict[str, Any]], preprocessing: Preprocessing, limits: ModelLimits, seed: int
) -> Samples:
    """The samples that are made of the client's reference images or, without images, of random numbers. `model_inputs`:
    the model's inputs, as `shapes.specification` returns them.

    Raises Permanent("bad_reference_images") if a file is not a picture or is too large, or if the model's input cannot
    be a picture.
    """

    def from_pictures(first: int) -> Iterator[Tensors]:
        for picture in _decoded_pictures(archive, limits, first):
            yield _sample_of(picture, model_inputs, preprocessing)

    def generated(first: int) -> Iterator[Tensors]:
        rng = np.random.default_rng(seed)
        specifications = [(value["name"], value["type"], value["shape"]) for value in model_inputs]
        for number in range(_GENERATED_SAMPLES):
            sample = random_tensors(specifications, rng)
            if number >= first:
                yield sample

    # `or` tests the length: without images, the first Samples is empty.
    return Samples(from_pictures, "reference images") or Samples(generated, "generated")


def _decoded_pictures(archive: Path, limits: ModelLimits, first: int) -> Iterator[Image.Image]:
    """Decode the images from number `first` on, one after the other."""
    if not archive.stat().st_size:  # the conversion has no reference images
        return
    try:
        with tarfile.open(archive, "r:") as tar:
            for number, member in enumerate(tar):
                if number >= limits.max_images:
                    raise refusals.bad_references(f"there are more than {limits.max_images} images")
                if not member.isreg():
                    raise refusals.bad_references(f"entry {number + 1} of the archive is not a file")
                if member.size > limits.max_image_bytes:
                    raise refusals.bad_references(f"file {number + 1} is larger than {limits.max_image_bytes} bytes")
                if number >= first:
                    stream = tar.extractfile(member)
                    yield _decode(b"" if stream is None else stream.read(), number + 1, limits)
    except tarfile.TarError as error:
        raise refusals.bad_references("the archive is damaged") from error


def _decode(data: bytes, number: int, limits: ModelLimits) -> Image.Image:
    with (
        damage_is_permanent(
            damaged=lambda: refusals.bad_references(f"file {number} is not a readable {', '.join(_FORMATS)} picture"),
            too_many_pixels=lambda: refusals.bad_references(
                f"file {number} has more than {limits.max_image_pixels} pixels"
            ),
        ),
        pillow_limits(limits.max_image_pixels),
    ):
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        return (to_8_bits(image) if is_grey16(image) else image).convert("RGB")


def _sample_of(picture: Image.Image, model_inputs: list[dict[str, Any]], preprocessing: Preprocessing) -> Tensors:
    only_input = model_inputs[0] if len(model_inputs) == 1 else None
    if only_input is None or only_input["type"] != "float" or len(only_input["shape"]) != 4:  # noqa: PLR2004 - N, C, H, W
        raise refusals.bad_references("the model has no single float input of four dimensions for a picture")
    return {only_input["name"]: _tensor_of(picture, only_input["shape"], preprocessing)}


def _tensor_of(picture: Image.Image, shape: list[int], preprocessing: Preprocessing) -> np.ndarray[Any, Any]:
    """The picture as a value for an input of this shape. Every item of the batch is the same picture. For an input of
    one channel, the value is the mean of red, green and blue.
    """
    channels, height, width = shape[1:] if preprocessing.layout == "NCHW" else (shape[3], *shape[1:3])
    if channels not in {1, _COLOUR_CHANNELS}:
        raise refusals.bad_references(f"the model's input has {channels} channels: pictures have 1 or 3")
    pixels = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR), np.float32) / 255
    pixels = (pixels - np.asarray(preprocessing.mean, np.float32)) / np.asarray(preprocessing.scale, np.float32)
    if channels == 1:
        pixels = pixels.mean(axis=2, keepdims=True)
    ordered = pixels.transpose(2, 0, 1) if preprocessing.layout == "NCHW" else pixels
    return np.repeat(ordered[np.newaxis], shape[0], axis=0).astype(np.float32)
