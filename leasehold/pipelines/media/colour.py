"""Converts pictures to sRGB, so that the colour profile can be dropped. The `resize` step converts each frame."""

from __future__ import annotations

import itertools
from io import BytesIO

from PIL import Image, ImageChops, ImageCms

MAX_PROFILE_BYTES = 4 * 1024 * 1024  # large ICC profiles, for example for offset presses, have 2.7 MB

# _INTENT: how a colour that sRGB does not have becomes a colour of sRGB. _FLAGS: the darkest colour of the profile
# becomes the darkest colour of sRGB.
_INTENT = ImageCms.Intent.RELATIVE_COLORIMETRIC
_FLAGS = ImageCms.Flags.BLACKPOINTCOMPENSATION
_OUTPUT_MODE = "RGB"

#: A profile's colour space -> the Pillow mode of its input, and the modes that can be converted to that mode.
_SPACES = {"RGB": ("RGB", {"L", "RGB"}), "GRAY": ("L", {"L"}), "CMYK": ("CMYK", {"CMYK"})}
#: Profiles that describe no picture: a link between two devices, a list of named colours, an abstract effect.
_UNUSABLE_CLASSES = {"link", "nmcl", "abst"}


class ToSrgb:
    """Converts frames of one picture to sRGB by the picture's profile.

    A profile is ignored if it is broken, too large, or of another colour space than the picture. A picture without a
    usable profile counts as sRGB. Exception: a CMYK picture becomes RGB by Pillow's own conversion.
    """

    def __init__(self, icc: bytes | None) -> None:
        self._profile, self._space = _parse_profile(icc)
        self._transforms: dict[str, ImageCms.ImageCmsTransform | None] = {}  # by the mode of the transform's input

    def __call__(self, image: Image.Image) -> Image.Image:
        """The picture as RGB or RGBA in sRGB. The profile does not concern the alpha channel, which stays as it is."""
        if image.mode not in {"LA", "RGBA"}:
            return self._convert(image)
        opaque = image.convert("L" if image.mode == "LA" else "RGB")
        converted = self._convert(opaque)
        converted.putalpha(image.getchannel("A"))
        return converted

    def _convert(self, image: Image.Image) -> Image.Image:
        input_mode, convertible_modes = _SPACES.get(self._space, ("", set[str]()))
        if image.mode in convertible_modes:
            transform = self._transform(input_mode)
            if transform is not None:
                return ImageCms.applyTransform(_in_mode(image, input_mode), transform) or image
        return _in_mode(image, _OUTPUT_MODE)

    def _transform(self, mode: str) -> ImageCms.ImageCmsTransform | None:
        if mode not in self._transforms:
            self._transforms[mode] = _build_transform(self._profile, mode)
        return self._transforms[mode]


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)


def _parse_profile(icc: bytes | None) -> tuple[ImageCms.ImageCmsProfile | None, str]:
    """The profile and its colour space. Returns None and "" if the profile cannot be used. The fields of a profile may
    have any content, and need not be text, so reading them may raise several errors.
    """
    if not icc or len(icc) > MAX_PROFILE_BYTES:
        return None, ""
    try:
        profile = ImageCms.ImageCmsProfile(BytesIO(icc))
        is_unusable = profile.profile.device_class.strip() in _UNUSABLE_CLASSES
        space = profile.profile.xcolor_space.strip()
    except (OSError, ValueError, TypeError, ImageCms.PyCMSError):
        return None, ""
    return (None, "") if is_unusable else (profile, space)


def _build_transform(profile: ImageCms.ImageCmsProfile | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Build the transform to sRGB. Returns None if the profile cannot be used, or the transform changes nothing."""
    if profile is None:
        return None
    srgb = ImageCms.createProfile("sRGB")
    try:
        transform = ImageCms.buildTransform(profile, srgb, mode, _OUTPUT_MODE, _INTENT, _FLAGS)
    except (ValueError, ImageCms.PyCMSError):
        return None
    return None if _changes_nothing(transform, mode) else transform


def _changes_nothing(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether the transform leaves every sample as it is, or changes its channels (0 to 255) by at most 1. Most
    profiles change nothing, because they are sRGB under another name. The samples are all combinations of 16 values of
    each channel.
    """
    if mode == "CMYK":
        return False
    bands = Image.getmodebands(mode)
    colours = bytes(itertools.chain.from_iterable(itertools.product(range(0, 256, 17), repeat=bands)))
    samples = Image.frombytes(mode, (len(colours) // bands, 1), colours)
    converted = ImageCms.applyTransform(samples, transform)
    if converted is None:
        return True
    change = ImageChops.difference(converted, samples.convert(_OUTPUT_MODE))
    return max(change.tobytes()) <= 1
