"""Makes the inputs with which both toolchains (our own, and that of the vendor Kneron) calibrate a model and compare
its versions. The inputs come from the client's reference images; without images, from random numbers.
"""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from leasehold.domain.errors import StepError
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.pipeline import Preprocessing
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.running import Tensors, random_tensors

_GENERATED_SAMPLES = 16
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_COLOUR_CHANNELS = 3


def samples(
    archive: Path, model_inputs: list[dict[str, Any]], preprocessing: Preprocessing, limits: ModelLimits, seed: int
) -> tuple[list[Tensors], str]:
    """The samples (values for the model's inputs), and their origin: "reference images" or "generated".
    `model_inputs`: as `shapes.specification` returns them.

    Raises Permanent("bad_reference_images") if a file is not a picture or is too large, or if the model's input cannot
    be a picture.
    """
    # One picture after the other: at full size, all of them might need more memory than the step has.
    pictures = _decoded_pictures(archive, limits)
    picture_samples = [_sample_of(picture, model_inputs, preprocessing) for picture in pictures]
    if picture_samples:
        return picture_samples, "reference images"
    rng = np.random.default_rng(seed)
    specifications = [(value["name"], value["type"], value["shape"]) for value in model_inputs]
    return [random_tensors(specifications, rng) for _ in range(_GENERATED_SAMPLES)], "generated"


def _decoded_pictures(archive: Path, limits: ModelLimits) -> Iterator[Image.Image]:
    """Decode the images one after the other, in memory."""
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
                stream = tar.extractfile(member)
                yield _decode(b"" if stream is None else stream.read(), number + 1, limits)
    except tarfile.TarError as error:
        raise refusals.bad_references("the archive is damaged") from error


def _decode(data: bytes, number: int, limits: ModelLimits) -> Image.Image:
    with _damage_is_refused(number):
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > limits.max_image_pixels:
            raise refusals.bad_references(f"file {number} has more than {limits.max_image_pixels} pixels")
        return image.convert("RGB")


@contextmanager
def _damage_is_refused(number: int) -> Iterator[None]:
    """Refuse file `number` after any error of Pillow: its readers raise whatever a damaged file makes them raise, such
    as IndexError. A lack of memory is no fault of the file.
    """
    try:
        yield
    except (MemoryError, StepError):
        raise
    except Exception as error:
        if "out of memory" in str(error).lower():  # Pillow's decoders say it by an OSError
            raise MemoryError(str(error)) from error
        raise refusals.bad_references(f"file {number} is not a readable {', '.join(_FORMATS)} picture") from error


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
