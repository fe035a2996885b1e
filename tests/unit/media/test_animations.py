"""Animations stay animations where the format can carry them."""

from __future__ import annotations

import struct
import zlib
from itertools import count
from typing import Any

import pytest
from PIL import Image

from tests import pictures
from tests.unit.media.conftest import RunMedia

DURATIONS = [120, 200, 80, 400]


def red_square_at(frame: Image.Image) -> int:
    """The x of the walking square."""
    for x in range(4, frame.width, 8):
        pixel = frame.getpixel((x, 12))
        assert isinstance(pixel, tuple)
        if pixel[0] > 150 and pixel[2] < 120:
            return x // 8
    raise AssertionError("no red square")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("GIF", {"loop": 0}), ("WEBP", {"lossless": True}), ("PNG", {}), ("AVIF", {"speed": 10, "quality": 90})],
)
def test_frames_and_durations_are_kept(run_media: RunMedia, kind: str, options: dict[str, Any]) -> None:
    outputs = run_media(pictures.animated(kind, DURATIONS, **options), variants=("thumb",))
    for name in ("resize.webp", "final.webp", "variants/thumb.webp"):
        frames = outputs.frames(name)
        assert [duration for _, duration in frames] == DURATIONS
        assert [red_square_at(frame) for frame, _ in frames] == [0, 1, 2, 3]
    assert outputs.value["original"]["frames"] == 4


def test_the_jpegs_of_an_animation_show_its_first_frame(run_media: RunMedia) -> None:
    outputs = run_media(pictures.animated("GIF", DURATIONS))
    assert red_square_at(outputs.image("compress.jpg")) == 0


@pytest.mark.parametrize(
    ("kind", "options", "plays"),
    [
        ("GIF", {"loop": 0}, 0),
        ("GIF", {"loop": 2}, 3),  # GIF counts repetitions after the first time
        ("GIF", {}, 1),
        ("WEBP", {"loop": 5}, 5),
        ("PNG", {"loop": 4}, 4),
    ],
)
def test_an_animation_is_played_as_often_as_before(
    run_media: RunMedia, kind: str, options: dict[str, Any], plays: int
) -> None:
    assert run_media(pictures.animated(kind, DURATIONS, **options)).image("final.webp").info["loop"] == plays


def apng(delays: list[tuple[int, int]], plays: int = 0) -> bytes:
    """An animation of one-coloured frames, each shown for `delays` (a fraction of seconds): Pillow would not write such
    numbers.
    """
    parts, numbers = [pictures.png_chunk(b"acTL", struct.pack(">II", len(delays), plays))], count()
    for index, (numerator, denominator) in enumerate(delays):
        control = struct.pack(">IIIIIHHBB", next(numbers), 8, 8, 0, 0, numerator, denominator, 0, 0)
        row = b"\0" + bytes([index * 90 % 256, 100, 9]) * 8
        number, kind = (b"", b"IDAT") if not index else (struct.pack(">I", next(numbers)), b"fdAT")
        parts += [pictures.png_chunk(b"fcTL", control), pictures.png_chunk(kind, number + zlib.compress(row * 8))]
    header = pictures.png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(parts) + pictures.png_chunk(b"IEND", b"")


@pytest.mark.parametrize("loop", [65534, 65535])
def test_a_gif_may_be_played_as_often_as_a_gif_can_say(run_media: RunMedia, loop: int) -> None:
    """65535 repetitions are 65536 plays: one more than a WebP file can say."""
    assert run_media(pictures.animated("GIF", DURATIONS, loop=loop)).image("final.webp").info["loop"] == 65535


@pytest.mark.parametrize("plays", [65535, 65536, 2**31 - 1])
def test_an_apng_may_be_played_as_often_as_an_apng_can_say(run_media: RunMedia, plays: int) -> None:
    assert run_media(apng([(1, 10), (2, 10)], plays)).image("final.webp").info["loop"] == 65535


def test_a_frame_may_be_shown_longer_than_webp_can_say(run_media: RunMedia) -> None:
    outputs = run_media(apng([(16_777, 1), (16_778, 1), (65_535, 1), (1, 10)]))
    for name in ("resize.webp", "final.webp"):
        assert [duration for _, duration in outputs.frames(name)] == [16_777_000, 16_777_215, 16_777_215, 100]


def test_an_animation_may_last_longer_than_webp_can_say(run_media: RunMedia) -> None:
    """The frames of the first 24 days keep their times, and all frames are there."""
    outputs = run_media(apng([(16_000, 1)] * 140))
    for name in ("resize.webp", "final.webp"):
        frames = outputs.frames(name)
        assert len(frames) == 140
        assert [duration for _, duration in frames[:134]] == [16_000_000] * 134
        assert sum(duration for _, duration in frames) == 2**31 - 1


def test_frames_without_a_duration_are_shown_as_browsers_show_them(run_media: RunMedia) -> None:
    outputs = run_media(pictures.animated("GIF", [0, 10, 20, 30]))
    assert [duration for _, duration in outputs.frames("final.webp")] == [100, 100, 20, 30]


def test_transparent_animations_keep_their_alpha(run_media: RunMedia) -> None:
    frames = [Image.new("RGBA", (40, 40), (0, 0, 0, 0)) for _ in range(3)]
    for n, frame in enumerate(frames):
        frame.paste((250, 0, 0, 255), (n * 10, 0, n * 10 + 10, 40))
    data = pictures.encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100, disposal=2, loop=0)
    outputs = run_media(data)
    assert outputs.value["original"]["has_alpha"] is True
    for n, (frame, _) in enumerate(outputs.frames("final.webp")):
        alpha = [frame.getpixel((x, 20)) for x in (5, 15, 25, 35)]
        assert [pixel[3] for pixel in alpha if isinstance(pixel, tuple)] == [255 * (n == at) for at in range(4)]


def test_the_substitute_picture_of_an_apng_is_not_part_of_the_animation(run_media: RunMedia) -> None:
    substitute = Image.new("RGB", (48, 32), pictures.YELLOW)
    data = pictures.encoded(
        substitute, "PNG", save_all=True, append_images=pictures.moving(3), default_image=True, duration=150
    )
    outputs = run_media(data)
    assert [red_square_at(frame) for frame, _ in outputs.frames("final.webp")] == [0, 1, 2]
    assert red_square_at(outputs.image("resize.jpg")) == 0


def test_large_animations_are_fitted_into_the_box(run_media: RunMedia) -> None:
    outputs = run_media(pictures.animated("GIF", DURATIONS), max_side=24)
    assert outputs.image("final.webp").size == (24, 16)


def test_a_gif_frame_beyond_the_canvas_is_cut_to_it(run_media: RunMedia) -> None:
    data = bytearray(pictures.animated("GIF", [100, 100]))
    second = data.index(b"\x2c", data.index(b"\x2c") + 1)
    while data[second + 5 : second + 9] != (8 + 8).to_bytes(2, "little") + (8).to_bytes(2, "little"):
        second = data.index(b"\x2c", second + 1)
    data[second + 1 : second + 3] = (44).to_bytes(2, "little")  # 16 wide at 44 of 48
    assert {frame.size for frame, _ in run_media(bytes(data)).frames("final.webp")} == {(48, 32)}


def test_a_file_of_several_photos_gives_the_first(run_media: RunMedia) -> None:
    first, second = pictures.corners(), Image.new("RGB", (96, 64), pictures.BLUE)
    outputs = run_media(pictures.encoded(first, "MPO", save_all=True, append_images=[second]))
    assert outputs.value["original"]["frames"] == 1
    pixel = outputs.image("final.webp").getpixel((16, 12))
    assert isinstance(pixel, tuple)
    assert pixel[0] > 180
