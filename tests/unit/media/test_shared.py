"""Pictures are shrunk where they lie: the same pixels as by a copy, and only where they do lie so."""

from __future__ import annotations

import pytest
from PIL import Image
from PIL import _imaging as core

from leasehold.pipelines.media import pixels
from leasehold.pipelines.media.shared_pixels import BYTES_PER_PIXEL, pixels_of
from tests import pictures

SIZE, SMALL = (301, 203), (157, 106)


def noise(mode: str) -> Image.Image:
    return Image.merge(mode, [Image.effect_noise(SIZE, 60 + 9 * band) for band in range(Image.getmodebands(mode))])


@pytest.mark.parametrize(("mode", "raw"), [("RGB", "RGBX"), ("CMYK", "CMYK")])
def test_all_bytes_of_a_picture_are_seen_in_their_order(mode: str, raw: str) -> None:
    picture = noise(mode)
    shared = pixels_of(picture)
    assert shared is not None
    assert len(shared) == SIZE[0] * SIZE[1] * BYTES_PER_PIXEL
    assert Image.frombytes(mode, SIZE, bytes(shared), "raw", raw).tobytes() == picture.tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I"])
def test_other_modes_are_not_shared(mode: str) -> None:
    assert pixels_of(Image.new(mode, SIZE)) is None


def test_a_picture_in_pieces_is_not_shared_and_shrunk_all_the_same() -> None:
    whole = pictures.corners(*SIZE)
    core.set_use_block_allocator(0)
    block = core.get_block_size()
    core.set_block_size(64 * 1024)
    try:
        pieces = whole.copy()
    finally:
        core.set_block_size(block)
        core.set_use_block_allocator(1)
    assert pixels_of(pieces) is None
    assert pixels.shrink(pieces, SMALL).tobytes() == pixels.shrink(whole, SMALL).tobytes()


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_a_picture_is_shrunk_to_the_same_bytes_as_by_a_copy(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    picture = noise(mode) if mode != "L" else Image.effect_noise(SIZE, 60)
    before = picture.tobytes()
    made = pixels.shrink(picture, SMALL)
    monkeypatch.setattr(pixels, "pixels_of", lambda _: None)
    assert (made.mode, made.size) == (mode, SMALL)
    assert made.tobytes() == pixels.shrink(picture, SMALL).tobytes()
    assert picture.tobytes() == before
