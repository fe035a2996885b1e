"""Pictures come out upright, in sRGB, with their transparency, in the box."""

from __future__ import annotations

import pytest
from PIL import Image, ImageChops, ImageStat

from leasehold.pipelines.media.pixels import shrink
from tests import pictures
from tests.unit.media.conftest import RunMedia

JPEGS = ("resize.jpg", "compress.jpg")
OUTPUTS = (*JPEGS, "final.webp")


def close(found: object, wanted: tuple[int, ...], within: int = 12) -> bool:
    assert isinstance(found, tuple), found
    return all(abs(a - b) <= within for a, b in zip(found, wanted, strict=True))


def assert_upright(image: Image.Image) -> None:
    width, height = image.size
    assert (width, height) == (96, 64)
    rgb = image.convert("RGB")
    wanted = {(16, 12): pictures.RED, (80, 12): pictures.GREEN, (16, 52): pictures.BLUE, (80, 52): pictures.YELLOW}
    for at, colour in wanted.items():
        assert close(rgb.getpixel(at), colour), (at, rgb.getpixel(at))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_comes_out_upright(run_media: RunMedia, orientation: int) -> None:
    stored = pictures.stored_as(pictures.corners(), orientation)
    outputs = run_media(pictures.encoded(stored, "JPEG", quality=95, exif=pictures.exif(orientation)))
    for name in OUTPUTS:
        assert_upright(outputs.image(name))
    assert (outputs.value["original"]["width"], outputs.value["original"]["height"]) == (96, 64)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "AVIF"])
def test_orientation_is_applied_to_every_kind_that_can_say_it(run_media: RunMedia, kind: str) -> None:
    stored = pictures.stored_as(pictures.corners(), 6)
    outputs = run_media(pictures.encoded(stored, kind, exif=pictures.exif(6)))
    for name in OUTPUTS:
        assert_upright(outputs.image(name))


def test_a_broken_exif_block_is_ignored(run_media: RunMedia) -> None:
    broken = pictures.encoded(pictures.corners(), "JPEG", quality=95, exif=b"Exif\0\0II*\0\xff\xff\xff\xffgarbage")
    assert_upright(run_media(broken).image("final.webp"))


def test_large_pictures_are_fitted_into_the_box_and_keep_their_proportions(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.corners(900, 600), "JPEG"), max_side=300)
    assert [outputs.image(name).size for name in OUTPUTS] == [(300, 200)] * 3
    assert (outputs.value["width"], outputs.value["height"]) == (300, 200)
    assert (outputs.value["original"]["width"], outputs.value["original"]["height"]) == (900, 600)


def test_small_pictures_are_never_enlarged(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.corners(40, 30), "PNG"), variants=("thumb", "large"))
    assert {outputs.image(name).size for name in (*OUTPUTS, "variants/thumb.webp", "variants/large.webp")} == {(40, 30)}


def test_an_extremely_long_picture_keeps_an_area(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(Image.new("L", (20_000, 1), 200), "PNG"))
    assert outputs.image("final.webp").size == (2048, 1)


def test_shrinking_while_loading_gives_the_picture_that_plain_shrinking_gives(run_media: RunMedia) -> None:
    photo = pictures.noisy(1203, 803)
    as_jpeg = run_media(pictures.encoded(photo, "JPEG", quality=98, subsampling="4:4:4"), max_side=150)
    quick = as_jpeg.image("resize.jpg").convert("RGB").resize((15, 10), Image.Resampling.BOX)
    plain = photo.resize((150, 100), Image.Resampling.LANCZOS).resize((15, 10), Image.Resampling.BOX)
    for y in range(10):
        for x in range(15):
            wanted = plain.getpixel((x, y))
            assert isinstance(wanted, tuple)
            assert close(quick.getpixel((x, y)), wanted, within=8)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("size", [(1201, 801), (900, 600), (601, 401), (301, 201)])
def test_whoever_resamples_the_picture_is_the_same(mode: str, size: tuple[int, int]) -> None:
    """In every mode and for odd factors, as Pillow alone would have made it."""
    image = pictures.noisy(1203, 803).resize((1202, 802)).convert(mode)
    ours, pillows = shrink(image, size), image.resize(size, Image.Resampling.LANCZOS)
    assert (ours.mode, ours.size) == (mode, size)
    assert max(ImageStat.Stat(ImageChops.difference(ours, pillows)).rms) < 3


def test_a_transparent_png_keeps_its_alpha(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.with_alpha(), "PNG"))
    for name in ("resize.png", "final.webp"):
        alpha = outputs.image(name).getchannel("A")
        assert [alpha.getpixel((x, 30)) for x in (5, 48, 90)] == [255, 128, 0]
    assert outputs.value["original"]["has_alpha"] is True


def test_the_jpeg_of_a_transparent_picture_is_laid_on_white(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.with_alpha(), "PNG"))
    for name in JPEGS:
        assert close(outputs.image(name).getpixel((90, 10)), (255, 255, 255))


def test_alpha_that_hides_nothing_is_no_alpha(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.corners().convert("RGBA"), "PNG"))
    assert "resize.png" not in outputs.files
    assert outputs.image("final.webp").mode == "RGB"
    assert outputs.value["original"]["has_alpha"] is False


def test_transparent_neighbours_do_not_bleed_into_the_edges(run_media: RunMedia) -> None:
    """Shrinking must weigh colours by their alpha: invisible black is not grey."""
    picture = Image.new("RGBA", (400, 400), (0, 0, 0, 0))
    picture.paste((255, 255, 255, 255), (0, 0, 203, 400))
    small = run_media(pictures.encoded(picture, "PNG"), max_side=100).image("resize.png")
    for x in range(49, 53):
        pixel = small.getpixel((x, 50))
        assert isinstance(pixel, tuple)
        assert pixel[3] == 0 or min(pixel[:3]) > 240


def test_palettes_with_transparency_keep_it(run_media: RunMedia) -> None:
    palette = pictures.corners().quantize(8)
    outputs = run_media(pictures.encoded(palette, "PNG", transparency=palette.getpixel((10, 10))))
    alpha = outputs.image("final.webp").getchannel("A")
    assert (alpha.getpixel((10, 10)), alpha.getpixel((80, 50))) == (0, 255)


def test_a_display_p3_picture_comes_out_in_srgb(run_media: RunMedia) -> None:
    """Worked by hand: linear light of the profile's gamma, the P3 to sRGB matrix, the sRGB curve."""
    picture = Image.new("RGB", (32, 32), (200, 100, 50))
    outputs = run_media(pictures.encoded(picture, "PNG", icc_profile=pictures.display_p3()))
    for name in OUTPUTS:
        assert close(outputs.image(name).getpixel((16, 16)), (216, 93, 24), within=4), name


def test_the_alpha_of_a_display_p3_picture_survives_its_conversion(run_media: RunMedia) -> None:
    picture = Image.new("RGBA", (32, 32), (200, 100, 50, 128))
    outputs = run_media(pictures.encoded(picture, "PNG", icc_profile=pictures.display_p3()))
    assert close(outputs.image("resize.png").getpixel((16, 16)), (216, 93, 24, 128), within=3)


def test_cmyk_without_a_profile_is_read_as_plain_inks(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(Image.new("CMYK", (32, 32), (255, 0, 0, 0)), "JPEG", quality=95))
    assert close(outputs.image("resize.jpg").getpixel((16, 16)), (0, 255, 255))


def test_cmyk_with_a_profile_is_read_by_it(run_media: RunMedia) -> None:
    cyan = Image.new("CMYK", (32, 32), (255, 0, 0, 0))
    outputs = run_media(pictures.encoded(cyan, "JPEG", quality=95, icc_profile=pictures.grey_press()))
    pixel = outputs.image("resize.jpg").getpixel((16, 16))
    assert isinstance(pixel, tuple)
    assert max(pixel) - min(pixel) < 6
    assert 150 < pixel[0] < 215


def test_grey_pictures_stay_grey(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(Image.new("L", (32, 32), 90), "JPEG", quality=95))
    for name in OUTPUTS:
        assert close(outputs.image(name).convert("RGB").getpixel((16, 16)), (90, 90, 90), within=3)


def test_a_grey_profile_is_applied(run_media: RunMedia) -> None:
    grey = Image.new("L", (32, 32), 128)
    outputs = run_media(pictures.encoded(grey, "PNG", icc_profile=pictures.linear_grey()))
    assert close(outputs.image("resize.jpg").getpixel((16, 16)), (188, 188, 188), within=4)


@pytest.mark.parametrize(
    "profile",
    [
        b"not a profile at all",
        pictures.grey_press(),
        pictures.display_p3()[:200],
        pictures.display_p3().replace(b"RGB ", b"R\xffB "),
    ],
    ids=["words", "of inks", "cut off", "of a space that is not text"],
)
def test_a_broken_or_foreign_profile_is_ignored(run_media: RunMedia, profile: bytes) -> None:
    picture = Image.new("RGB", (32, 32), (200, 100, 50))
    outputs = run_media(pictures.encoded(picture, "PNG", icc_profile=profile))
    assert close(outputs.image("resize.jpg").getpixel((16, 16)), (200, 100, 50), within=4)


@pytest.mark.parametrize(("colour", "bands", "wanted"), [(0, 1, (128,) * 3), (2, 3, (128,) * 3)])
def test_sixteen_bit_pngs_keep_their_brightness(
    run_media: RunMedia, colour: int, bands: int, wanted: tuple[int, ...]
) -> None:
    line = b"\0" + b"\x80\x40" * bands * 32
    outputs = run_media(pictures.png(32, 32, 16, colour, line * 32))
    assert close(outputs.image("resize.jpg").convert("RGB").getpixel((16, 16)), wanted, within=2)


def test_a_transparent_grey_of_sixteen_bits_is_exactly_that_grey(run_media: RunMedia) -> None:
    line = b"\0" + b"\x80\x40" * 16 + b"\x80\x41" * 16
    data = pictures.png(32, 32, 16, 0, line * 32, pictures.png_chunk(b"tRNS", b"\x80\x40"))
    alpha = run_media(data).image("resize.png").getchannel("A")
    assert (alpha.getpixel((4, 4)), alpha.getpixel((28, 4))) == (0, 255)


def test_one_bit_pngs_are_read(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(Image.new("1", (32, 32), 1), "PNG"))
    assert close(outputs.image("resize.jpg").convert("RGB").getpixel((16, 16)), (255, 255, 255))
