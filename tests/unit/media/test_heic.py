"""HEIC, as phones write it; and what is made to hurt, refused before the decoder sees it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from leasehold.pipelines.media import heic_decoder
from leasehold.pipelines.media.headers import heic
from tests import heif, pictures
from tests.heif import Heif
from tests.support.not_here import only_where
from tests.unit.media.conftest import RefusalOf, RunMedia

pytestmark = only_where(heic_decoder.load_decoder(), "the extra heic")

HUGE = 60_000


RED, GREEN, BLUE, YELLOW = pictures.RED, pictures.GREEN, pictures.BLUE, pictures.YELLOW


def nearest(image: Image.Image, x: int, y: int) -> pictures.Colour:
    red, green, blue = pixel(image, x, y)
    return min((RED, GREEN, BLUE, YELLOW), key=lambda one: abs(one[0] - red) + abs(one[1] - green) + abs(one[2] - blue))


def pixel(image: Image.Image, x: int, y: int) -> pictures.Colour:
    found = image.convert("RGB").getpixel((x, y))
    assert isinstance(found, tuple)
    return found[0], found[1], found[2]


def colours(image: Image.Image) -> list[pictures.Colour]:
    """Of its corners: top left, top right, bottom left, bottom right."""
    right, bottom = image.width - 12, image.height - 12
    return [nearest(image, x, y) for y in (12, bottom) for x in (12, right)]


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ([], [RED, GREEN, BLUE, YELLOW]),
        ([heif.turned(1)], [GREEN, YELLOW, RED, BLUE]),
        ([heif.turned(2)], [YELLOW, BLUE, GREEN, RED]),
        ([heif.turned(3)], [BLUE, RED, YELLOW, GREEN]),
        ([heif.mirrored(0)], [BLUE, YELLOW, RED, GREEN]),
        ([heif.mirrored(1)], [GREEN, RED, YELLOW, BLUE]),
        ([heif.turned(1), heif.mirrored(1)], [YELLOW, GREEN, BLUE, RED]),
    ],
)
def test_a_turned_or_mirrored_photo_comes_out_as_it_was_seen(
    run_media: RunMedia, properties: list[bytes], expected: list[pictures.Colour]
) -> None:
    made = run_media(heif.of(heif.CORNERS, *properties))
    facts = made.value["original"]
    odd = any(found[4:8] == b"irot" and found[8] & 1 for found in properties)
    assert (facts["width"], facts["height"]) == ((64, 96) if odd else (96, 64))
    assert colours(made.image("final.webp")) == expected


def test_only_the_container_says_how_a_photo_is_turned(run_media: RunMedia) -> None:
    """Cameras write it into EXIF, too; a reader of HEIC does not turn it by that."""
    made = run_media(heif.photo(pictures.display_p3(), pictures.exif(6).tobytes()[6:]))
    assert colours(made.image("final.webp")) == [RED, GREEN, BLUE, YELLOW]


def test_a_photo_of_wide_colours_is_brought_into_srgb(run_media: RunMedia) -> None:
    plain = pixel(run_media(heif.of(heif.CORNERS)).image("resize.jpg"), 12, 12)
    wide = run_media(heif.of(heif.CORNERS, heif.profile(pictures.display_p3())))
    assert pixel(wide.image("resize.jpg"), 12, 12)[0] > plain[0] + 8


def test_a_photo_of_tiles_is_put_together(run_media: RunMedia) -> None:
    made = run_media(tiled().build())
    assert made.value["original"] == {
        "width": 120, "height": 100, "bytes": len(tiled().build()), "content_type": "image/heic", "frames": 1,
        "has_alpha": False,
    }  # fmt: skip
    assert colours(made.image("final.webp")) == [RED, GREEN, BLUE, YELLOW]


def test_a_photo_of_10_bits_a_channel_keeps_its_colours(run_media: RunMedia) -> None:
    assert colours(run_media(heif.of(heif.TEN_BITS)).image("final.webp")) == [RED, GREEN, BLUE, YELLOW]


def test_transparency_is_kept(run_media: RunMedia) -> None:
    made = run_media(with_opacity().build())
    assert made.value["original"]["has_alpha"]
    alpha = made.image("final.webp").getchannel("A")
    assert [round(float(alpha.getpixel((x, 32))) / 64) for x in (8, 48, 88)] == [4, 2, 0]  # type: ignore[arg-type]


def test_of_several_pictures_the_first_is_the_picture(run_media: RunMedia) -> None:
    made = Heif(primary=2)
    for still in (heif.RED_TILE, heif.CORNERS, heif.BLUE_TILE):
        made.still(still)
    done = run_media(made.build())
    assert done.value["original"]["frames"] == 1
    assert colours(done.image("final.webp")) == [RED, GREEN, BLUE, YELLOW]


@pytest.mark.parametrize("declared", ["image/heic", "image/heif"])
def test_either_name_of_the_kind_is_true(run_media: RunMedia, declared: str) -> None:
    assert run_media(heif.of(heif.CORNERS), content_type=declared).value["original"]["content_type"] == "image/heic"


def test_without_the_extra_it_is_refused(refusal_of: RefusalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    forgetful: Callable[[], bool] = heic_decoder.load_decoder.__wrapped__
    monkeypatch.setattr(heic_decoder, "load_decoder", forgetful)
    assert refusal_of(heif.of(heif.CORNERS)) == "unsupported_format"


def test_a_decoder_with_known_holes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi_heif.libheif_version", lambda: "1.23.0")
    assert not heic_decoder.load_decoder.__wrapped__()


# --- what is made to hurt


def tiled(area: tuple[int, int] = (120, 100)) -> Heif:
    made = Heif(primary=5)
    tiles = [made.still(tile) for tile in (heif.RED_TILE, heif.GREEN_TILE, heif.BLUE_TILE, heif.YELLOW_TILE)]
    made.grid(2, 2, area, tiles)
    return made


def with_opacity() -> Heif:
    made = Heif()
    made.still(heif.CORNERS)
    made.names.append((b"auxl", made.still(heif.OPACITY, heif.ALPHA), [1]))
    return made


def claims(width: int, height: int) -> bytes:
    made = Heif()
    made.add(b"hvc1", heif.CORNERS.pixels, heif.size(width, height), heif.CORNERS.properties[0])
    return made.build()


def grid_of(rows: int, columns: int, area: tuple[int, int], tiles: int) -> bytes:
    """`tiles` of them, used again and again."""
    made = Heif()
    numbers = [made.still(heif.RED_TILE) for _ in range(tiles)]
    made.primary = made.grid(rows, columns, area, [numbers[n % tiles] for n in range(rows * columns)])
    return made.build()


def many_pictures() -> bytes:
    made = Heif()
    for _ in range(5000):
        made.still(heif.RED_TILE)
    return made.build()


def repeated() -> bytes:
    """One still whose bytes are named for each of 900 items."""
    made = Heif()
    for _ in range(900):
        made.still(heif.RED_TILE)
    made.items[0] = (b"hvc1", heif.RED_TILE.pixels + bytes(200_000), made.items[0][2])
    first = made.build().index(heif.RED_TILE.pixels)
    made.places = {number: [(first, 200_000)] for number in range(1, 901)}
    return made.build()


def copied() -> bytes:
    """A profile of a megabyte, for each of 200 pictures."""
    made = Heif()
    for _ in range(200):
        made.still(heif.RED_TILE, heif.profile(bytes(1_000_000)))
    return made.build()


def described() -> bytes:
    """A megabyte of metadata, of each of 200 pictures."""
    made = Heif()
    pictures_of = [made.still(heif.RED_TILE) for _ in range(200)]
    made.names.append((b"cdsc", made.add(b"mime", bytes(1_000_000)), pictures_of))
    return made.build()


def circle() -> bytes:
    made = with_opacity()
    made.names.append((b"auxl", 1, [2]))
    return made.build()


def nested() -> bytes:
    made = tiled((120, 120))
    made.primary = made.grid(1, 1, (120, 120), [5])
    return made.build()


def other(kind: bytes) -> bytes:
    made = Heif()
    made.names.append((b"dimg", made.add(kind, bytes(40), heif.size(96, 64)), [made.still(heif.CORNERS)]))
    return made.build()


def beside(kind: bytes) -> bytes:
    made = Heif()
    made.still(heif.CORNERS)
    made.add(kind, bytes(40), heif.size(96, 64))
    return made.build()


def called_avif() -> bytes:
    made = Heif(brands=b"avifmif1avif")
    made.still(heif.CORNERS)
    return made.build()


def larger_inside() -> heif.Still:
    """Its pixels begin with parameters of their own."""
    unit = heif.parameters(HUGE, HUGE)
    pixels = struct.pack(">I", len(unit)) + unit + heif.CORNERS.pixels
    return heif.Still(96, 64, heif.CORNERS.parameters, pixels)


def transparent_tiles() -> bytes:
    """Small tiles, each with a large transparency: the decoder decodes it for each tile."""
    made = tiled()
    large = heif.with_size(heif.Still(6000, 6000, heif.OPACITY.parameters, heif.OPACITY.pixels), 6000, 6000)
    for tile in range(1, 5):
        made.names.append((b"auxl", made.still(large, heif.ALPHA), [tile]))
    return made.build()


def transparent_many_times() -> bytes:
    made = Heif()
    made.still(heif.CORNERS)
    for _ in range(40):
        made.names.append((b"auxl", made.still(heif.OPACITY, heif.ALPHA), [1]))
    return made.build()


def endless_pieces() -> bytes:
    """Pieces without a byte, in a table without a byte for each: 65,535 of the same item, 2,000 times."""
    data = heif.of(heif.CORNERS)
    place, meta = data.index(b"iloc") - 4, data.index(b"meta") - 4
    (place_size,), (meta_size,) = struct.unpack_from(">I", data, place), struct.unpack_from(">I", data, meta)
    table = struct.pack(">HHHH", 1, 1, 0, 0xFFFF) * 2000
    changed = heif.full(b"iloc", b"\0\0", struct.pack(">H", 2000), table, version=1) + heif.box(b"idat")
    return data[:meta] + heif.box(b"meta", data[meta + 8 : place], changed, data[place + place_size : meta + meta_size])


def bombs() -> dict[str, tuple[bytes, str]]:
    again = heif.CORNERS
    twice = heif.Still(96, 64, again.parameters, again.pixels * 2)
    crumbs = heif.Still(96, 64, again.parameters, b"\0\0\0\3\x4e\1\0" * 100_000 + again.pixels)
    sequence = heif.box(b"moov", bytes(100))
    return {
        "claims an area": (claims(HUGE, HUGE), "too_many_pixels"),
        "claims a side": (claims(2**32 - 1, 1), "too_many_pixels"),
        "no area": (claims(0, 64), "corrupt_image"),
        "parameters of another size": (heif.of(heif.with_size(again, HUGE, HUGE)), "corrupt_image"),
        "parameters among the pixels": (heif.of(larger_inside()), "corrupt_image"),
        "grid of an area": (grid_of(2, 2, (HUGE, HUGE), 4), "too_many_pixels"),
        "grid of one tile": (grid_of(100, 100, (6400, 6400), 1), "corrupt_image"),
        "grid of more than it needs": (grid_of(30, 30, (64, 64), 900), "corrupt_image"),
        "grid without tiles": (grid_of(16, 16, (1024, 1024), 1).replace(b"dimg", b"dimh"), "corrupt_image"),
        "grid of grids": (nested(), "corrupt_image"),
        "thousands of pictures": (many_pictures(), "corrupt_image"),
        "the same bytes again": (repeated(), "corrupt_image"),
        "a profile for each": (copied(), "corrupt_image"),
        "metadata for each": (described(), "corrupt_image"),
        "alpha of its alpha": (circle(), "corrupt_image"),
        "transparency of tiles": (transparent_tiles(), "corrupt_image"),
        "transparency again and again": (transparent_many_times(), "corrupt_image"),
        "an endless list of pieces": (endless_pieces(), "corrupt_image"),
        "two pictures in one": (heif.of(twice), "corrupt_image"),
        "crumbs": (heif.of(crumbs), "corrupt_image"),
        "sequence": (heif.of(again) + sequence, "unsupported_format"),
        "overlay": (other(b"iovl"), "unsupported_format"),
        "copy": (other(b"iden"), "unsupported_format"),
        "uncompressed beside": (beside(b"unci"), "unsupported_format"),
        "metadata only": (other(b"mime"), "unsupported_format"),
        "av1 called heic": (heif.of(again).replace(b"hvc1", b"av01"), "unsupported_format"),
        "heic called avif": (called_avif(), "corrupt_image"),
        "two contents": (heif.of(again) + heif.full(b"meta", heif.box(b"free")), "corrupt_image"),
        "sequence only": (heif.box(b"ftyp", b"hevc", bytes(4), b"hevc") + sequence, "unsupported_format"),
    }


_IN_LITTLE_MEMORY = """
import json, pathlib, resource, sys
from leasehold.domain.errors import Permanent
from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import resize
held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 40 * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
refused = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        resize(Work("media", "resize", MediaParams(), {"original": path}, path.parent))
    except (Permanent, MemoryError) as error:
        refused[path.name] = getattr(error, "code", "MemoryError")
print(json.dumps(refused))
"""


def test_bombs_are_refused_without_being_decoded(tmp_path: Path) -> None:
    """By a process that has 40 MiB to spare, in seconds."""
    made = bombs()
    for name, (data, _) in made.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", _IN_LITTLE_MEMORY, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert json.loads(ran.stdout) == {name: code for name, (_, code) in made.items()}


def test_a_photo_cut_off_at_any_byte_is_refused(refusal_of: RefusalOf) -> None:
    data = tiled().build()
    assert {refusal_of(data[:kept]) for kept in range(24, len(data), 7)} == {"corrupt_image"}


def test_the_largest_photo_that_is_accepted_is_looked_at_in_no_time() -> None:
    assert heic.read(tiled().build()).pixels == 120 * 100
