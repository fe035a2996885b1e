"""TIFF and BMP, as scanners and old programs write them; and what is made to hurt."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from leasehold.domain.errors import Permanent
from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import resize
from tests import pictures


def resized(data: bytes, directory: Path, **limits: Any) -> dict[str, Any]:
    path = directory / "original"
    path.write_bytes(data)
    done = resize(
        Work("media", "resize", MediaParams.model_validate({"limits": limits}), {"original": path}, directory)
    )
    assert done.value is not None
    return dict(done.value["original"])


def refusal(data: bytes, directory: Path, **limits: Any) -> str:
    with pytest.raises(Permanent) as refused:
        resized(data, directory, **limits)
    return refused.value.code


def tiff(entries: list[tuple[int, int, int, int]], *, following: int = 0, count: int | None = None) -> bytes:
    """By hand: tag, kind, items, value; then a folder `following`, and some bytes of pixels."""
    body = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    number = len(entries) if count is None else count
    return b"II*\0" + struct.pack("<IH", 8, number) + body + struct.pack("<I", following) + bytes(1000)


def page(**changes: int) -> list[tuple[int, int, int, int]]:
    said = {"width": 8, "height": 8, "bits": 8, "codec": 1, "kind": 1, "at": 200, "bytes": 64} | changes
    tags = {"width": 256, "height": 257, "bits": 258, "codec": 259, "kind": 262, "at": 273, "bytes": 279,
            "tile_width": 322, "tile_height": 323}  # fmt: skip
    return sorted(
        (tags[name], 4 if name not in ("bits", "codec", "kind") else 3, 1, value) for name, value in said.items()
    )


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("codec", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_what_programs_write_is_taken(tmp_path: Path, mode: str, codec: str) -> None:
    image = Image.new("L", (40, 30), 90).convert(mode) if mode != "I;16" else Image.new("I;16", (40, 30), 20000)
    facts = resized(pictures.encoded(image, "TIFF", compression=codec), tmp_path)
    assert (facts["width"], facts["height"], facts["content_type"]) == (40, 30, "image/tiff")


def test_a_fax_and_a_jpeg_in_a_tiff_are_taken(tmp_path: Path) -> None:
    for mode, codec in (("1", "group4"), ("RGB", "jpeg")):
        assert resized(pictures.encoded(Image.new(mode, (64, 48)), "TIFF", compression=codec), tmp_path)["width"] == 64


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_tiff_comes_out_upright(tmp_path: Path, orientation: int) -> None:
    facts = resized(pictures.encoded(Image.new("RGB", (40, 30)), "TIFF", tiffinfo={274: orientation}), tmp_path)
    assert (facts["width"], facts["height"]) == ((30, 40) if orientation > 4 else (40, 30))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_a_bmp_is_taken(tmp_path: Path, mode: str) -> None:
    facts = resized(pictures.encoded(Image.new("L", (40, 30), 90).convert(mode), "BMP"), tmp_path)
    assert (facts["width"], facts["height"], facts["content_type"]) == (40, 30, "image/bmp")


def test_a_bmp_from_the_top_down_is_taken(tmp_path: Path) -> None:
    data = bytearray(pictures.encoded(Image.new("RGB", (40, 30)), "BMP"))
    data[22:26] = struct.pack("<i", -30)
    assert resized(bytes(data), tmp_path)["height"] == 30


def test_of_many_pages_the_first_is_the_picture(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (30 + number, 20)) for number in range(5)]
    facts = resized(pictures.encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:]), tmp_path)
    assert (facts["width"], facts["frames"]) == (30, 1)


def test_pages_in_a_circle_are_not_followed(tmp_path: Path) -> None:
    assert resized(tiff(page(), following=8), tmp_path)["frames"] == 1


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (tiff(page(width=2**31, height=2**31)), "too_many_pixels"),
        (tiff(page(width=2**32 - 1, height=1)), "too_many_pixels"),
        (tiff(page(tile_width=2**20, tile_height=2**20)), "too_many_pixels"),
        (tiff(page(codec=6)), "unsupported_format"),
        (tiff(page(codec=34712)), "unsupported_format"),
        (tiff([*page(), *[(40_000 + n, 1, 900, 100) for n in range(2000)]]), "corrupt_image"),
        (tiff([*page(), *page()]), "corrupt_image"),
        (tiff(page(), count=65_535), "corrupt_image"),
        (b"II*\0" + struct.pack("<I", 2**32 - 1), "corrupt_image"),
        (tiff(page(width=0)), "corrupt_image"),
        (tiff(page(at=2**31)), "corrupt_image"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, 2**31 - 1, 2**31 - 1) + bytes(40), "too_many_pixels"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, -5, 5) + bytes(40), "corrupt_image"),
        (b"BM" + bytes(12) + struct.pack("<IHH", 12, 65535, 65535) + bytes(40), "too_many_pixels"),
    ],
    ids=[
        "area", "one line", "tiles", "old jpeg", "a vendor's codec", "entries that share bytes", "contradiction",
        "folder beyond the end", "offset beyond the end", "no area", "pixels beyond the end", "bmp", "negative bmp",
        "old bmp",
    ],
)  # fmt: skip
def test_what_is_made_to_hurt_is_refused_with_a_code(tmp_path: Path, data: bytes, code: str) -> None:
    assert refusal(data, tmp_path) == code


def test_a_file_that_decodes_to_a_thousand_times_its_size_is_bounded_by_its_pixels(tmp_path: Path) -> None:
    data = pictures.encoded(Image.new("L", (5000, 5000)), "TIFF", compression="tiff_adobe_deflate")
    assert len(data) < 60_000
    assert refusal(data, tmp_path, max_pixels=24_999_999) == "too_many_pixels"
    assert resized(data, tmp_path)["width"] == 5000
