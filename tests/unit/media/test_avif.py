"""AVIF, as encoders write it; and files whose streams are larger than they declare, refused before the decoder."""

from __future__ import annotations

import struct
from contextlib import suppress
from io import BytesIO

import pytest
import pyvips
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from leasehold.domain.errors import Permanent
from leasehold.pipelines.media.decode import Picture
from leasehold.pipelines.media.headers import av1, avif, avif_tracks
from leasehold.pipelines.media.inspection import _read_header
from tests import av1 as streams
from tests import heif, pictures
from tests.av1 import Frame, Sequence
from tests.heif import Heif
from tests.support.patient import patient

SMALL, SIZE, LARGE = (10, 10), (96, 64), (2000, 1500)


def made(**options: object) -> bytes:
    return pictures.encoded(pictures.noisy(*SIZE), "AVIF", speed=10, **options)


def by_vips(bands: int = 3, **options: object) -> bytes:
    image = (pyvips.Image.black(*SIZE, bands=bands) + 40).cast("uchar").copy(interpretation="srgb")
    data: bytes = image.heifsave_buffer(compression="av1", effort=0, **options)
    return data


def animated(**options: object) -> bytes:
    return pictures.animated("AVIF", [100] * 12, speed=10, **options)


def still(size: tuple[int, int] = SIZE) -> tuple[bytes, bytes]:
    return streams.coded(pictures.noisy(*size))


def flat(size: tuple[int, int]) -> tuple[bytes, bytes]:
    return streams.coded(Image.new("L", size, 9))


def of_items(*items: tuple[bytes, tuple[int, int], bytes], primary: int = 1) -> Heif:
    """Stills: stream, declared size, configuration."""
    file = Heif(brands=b"avifavifmif1miaf", primary=primary)
    for stream, size, configuration in items:
        file.add(b"av01", stream, heif.size(*size), configuration)
    return file


def grid(area: tuple[int, int] = (180, 120)) -> Heif:
    stream, configuration = still()
    file = of_items(*[(stream, SIZE, configuration)] * 4)
    file.primary = file.grid(2, 2, area, [1, 2, 3, 4])
    return file


def transparent(size: tuple[int, int] = SIZE, declared: tuple[int, int] | None = None) -> bytes:
    stream, configuration = still()
    alpha, alpha_configuration = flat(size)
    file = of_items((stream, SIZE, configuration))
    number = file.add(b"av01", alpha, heif.size(*(declared or size)), alpha_configuration, streams.ALPHA)
    file.names.append((b"auxl", number, [1]))
    return file.build()


def of_equal_tiles() -> bytes:
    """Encoders store equal tiles once."""
    file = grid()
    data = file.build()
    first = data.index(file.items[0][1])
    file.places = {number: [(first, len(file.items[0][1]))] for number in (2, 3, 4)}
    return file.build()


def in_pieces() -> bytes:
    stream, configuration = still()
    file = of_items((stream, SIZE, configuration))
    file.places = {1: [(0, 8), (0, 8)]}
    start = file.build().index(stream)
    file.places = {1: [(start, 8), (start + 8, len(stream) - 8)]}
    return file.build()


def in_its_header() -> bytes:
    """The stream is in the `idat` box."""
    stream, configuration = still()
    data = of_items((stream, SIZE, configuration)).build()
    place = data.index(b"iloc") - 4
    (old,) = struct.unpack_from(">I", data, place)
    entry = struct.pack(">HHHHII", 1, 1, 0, 1, 0, len(stream))
    changed = heif.full(b"iloc", b"\x44\x00", struct.pack(">H", 1), entry, version=1) + heif.box(b"idat", stream)
    meta = data.index(b"meta") - 4
    (size,) = struct.unpack_from(">I", data, meta)
    body = data[meta + 8 : place] + changed + data[place + old : meta + size]
    return data[:meta] + heif.box(b"meta", body)


REAL = {
    "4:2:0": made(),
    "4:2:2": made(subsampling="4:2:2"),
    "4:4:4": made(subsampling="4:4:4"),
    "4:0:0": pictures.encoded(pictures.noisy(*SIZE).convert("L"), "AVIF", speed=10),
    "lossless": made(quality=100, subsampling="4:4:4"),
    "tiles": made(tile_rows=1, tile_cols=1, autotiling=False),
    "one pixel": pictures.encoded(Image.new("RGB", (1, 1)), "AVIF", speed=10),
    "odd sides": pictures.encoded(pictures.noisy(97, 61), "AVIF", speed=10),
    "transparency": pictures.encoded(pictures.with_alpha(), "AVIF", speed=10),
    "10 bits": by_vips(bitdepth=10),
    "12 bits": by_vips(bitdepth=12, subsample_mode="off"),
    "8 bits by another writer": by_vips(4, bitdepth=8, lossless=True),
    "animation": animated(),
    "animation without orders": animated(advanced={"enable-order-hint": "0"}),
    "animation with times": animated(advanced={"timing-info": "model"}),
    "transparent animation": pictures.encoded(
        pictures.with_alpha(), "AVIF", speed=10, save_all=True, append_images=[pictures.with_alpha().rotate(180)]
    ),
    "grid": grid().build(),
    "grid of equal tiles": of_equal_tiles(),
    "transparency by hand": transparent(),
    "in pieces": in_pieces(),
    "in its header": in_its_header(),
}


@pytest.mark.parametrize("name", REAL)
def test_what_encoders_write_is_accepted(name: str) -> None:
    """The header has exactly the decoder's size and number of frames."""
    data = REAL[name]
    header = _read_header("image/avif", data)
    with Image.open(BytesIO(data)) as image:
        assert (header.width, header.height, header.frames) == (*image.size, getattr(image, "n_frames", 1))
    picture = Picture(data, "image/avif", header)
    for index in range(picture.frames):
        assert picture.frame(index)[0].size == (header.width, header.height)


# --- files that declare less than their streams have


def declared(data: bytes, size: tuple[int, int]) -> bytes:
    """The file, with another size of each item."""
    return data.replace(data[data.index(b"ispe") :][:16], b"ispe" + bytes(4) + struct.pack(">II", *size))


def small_track() -> bytes:
    data = bytearray(animated())
    head, entry = data.index(b"tkhd") + 4, data.index(b"stsd") + 20
    assert data[head] == 1
    struct.pack_into(">II", data, head + 88, *(side << 16 for side in SMALL))
    struct.pack_into(">HH", data, entry + 24, *SMALL)
    return bytes(data)


def hidden_by_the_frame() -> bytes:
    stream = streams.with_own_size(streams.first_of_a_sequence(pictures.noisy(*SIZE)), SMALL)
    return streams.file_of(stream, SMALL, still()[1])


def second_sequence() -> bytes:
    small, configuration = flat(SMALL)
    return of_items((small + flat(SIZE)[0], SMALL, configuration)).build()


def transparent_tiles() -> bytes:
    """A grid of small tiles. Each has a large transparency, which the decoder decodes for each tile."""
    file = grid()
    alpha, configuration = flat(LARGE)
    for tile in (1, 2, 3, 4):
        number = file.add(b"av01", alpha, heif.size(*LARGE), configuration, streams.ALPHA)
        file.names.append((b"auxl", number, [tile]))
    return file.build()


def many_transparencies() -> bytes:
    stream, configuration = still()
    file = of_items((stream, SIZE, configuration))
    for _ in range(40):
        file.names.append((b"auxl", file.add(b"av01", stream, heif.size(*SIZE), configuration, streams.ALPHA), [1]))
    return file.build()


def larger_grid() -> bytes:
    file = grid()
    kind, content, (_, *others) = file.items[4]
    file.items[4] = (kind, content, [heif.size(*SMALL), *others])
    return file.build()


def large_tile() -> bytes:
    """One tile has layers, and the largest of them counts: it is larger than its place."""
    file = grid()
    stream, configuration = flat(LARGE)
    file.items[0] = (b"av01", stream, [heif.size(*SIZE), configuration, heif.box(b"a1op", b"\0")])
    return file.build()


def without_parameters() -> bytes:
    """The second tile would be decoded with the parameters of the first."""
    file = grid()
    kind, stream, properties = file.items[1]
    frames = b"".join(streams.unit(kind, content) for kind, content in streams.units(stream) if kind == streams.FRAME)
    file.items[1] = (kind, frames, properties)
    return file.build()


def of_frames(*frames: bytes, size: tuple[int, int] = SIZE) -> bytes:
    return streams.file_of(b"".join(frames), size, still()[1])


PLAIN, KEY = Sequence(), Frame()
SHOWN_AGAIN = streams.unit(streams.FRAME_HEADER, b"\x80")


def padded(count: int) -> bytes:
    return of_frames(PLAIN.unit(), KEY.unit(PLAIN), streams.unit(streams.PADDING, b"") * count)


def endless_pieces() -> bytes:
    """Pieces that take no byte of the header and have none: 65,535 of the same item, 2,000 times."""
    stream, configuration = still()
    data = of_items((stream, SIZE, configuration)).build()
    place = data.index(b"iloc") - 4
    (old,) = struct.unpack_from(">I", data, place)
    count = 2000
    table = struct.pack(">HHHH", 1, 1, 0, 0xFFFF) * count
    changed = heif.full(b"iloc", b"\0\0", struct.pack(">H", count), table, version=1) + heif.box(b"idat")
    meta = data.index(b"meta") - 4
    (size,) = struct.unpack_from(">I", data, meta)
    return data[:meta] + heif.box(b"meta", data[meta + 8 : place], changed, data[place + old : meta + size])


HOSTILE = {
    "a still": declared(made(), SMALL),
    "a grid's tile": declared(grid().build(), SMALL),
    "a grid": larger_grid(),
    "a tile with layers": large_tile(),
    "a grid without tiles": grid().build().replace(b"dimg", b"dimh"),
    "a grid of one tile": grid().build().replace(struct.pack(">4H", 1, 2, 3, 4), struct.pack(">4H", 1, 1, 1, 1)),
    "transparency": transparent(LARGE, SIZE),
    "large transparency": transparent(LARGE),
    "transparency of tiles": transparent_tiles(),
    "many transparencies": many_transparencies(),
    "a track": small_track(),
    "a frame header": hidden_by_the_frame(),
    "a second sequence": second_sequence(),
    "no parameters": without_parameters(),
    "no frame": of_frames(PLAIN.unit()),
    "no item": Heif(brands=b"avifavif").build(),
    "a frame that needs others": of_frames(PLAIN.unit(), Frame(streams.INTER).unit(PLAIN)),
    "a first frame that is hidden": of_frames(PLAIN.unit(), Frame(is_shown=False).unit(PLAIN)),
    "a first frame that is repeated": of_frames(PLAIN.unit(), SHOWN_AGAIN),
    "five pictures in one": of_frames(PLAIN.unit(), KEY.unit(PLAIN) * 5),
    "one picture five times": of_frames(PLAIN.unit(), KEY.unit(PLAIN), SHOWN_AGAIN * 4),
    "crumbs": padded(av1.MAX_UNITS),
    "a unit that is cut off": of_frames(PLAIN.unit(), KEY.unit(PLAIN), b"\x7a\x7f"),
    "a unit of an endless length": of_frames(PLAIN.unit(), KEY.unit(PLAIN), b"\x7a" + b"\xff" * 20),
    "a later sequence": of_frames(PLAIN.unit(), KEY.unit(PLAIN), Sequence(LARGE).unit(), KEY.unit(Sequence(LARGE))),
    "an endless list of pieces": endless_pieces(),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_hides_the_size_of_its_streams_is_refused(name: str) -> None:
    with pytest.raises(Permanent) as refused:
        _read_header("image/avif", HOSTILE[name])
    assert refused.value.code == "corrupt_image"


def test_the_decoder_makes_a_frame_larger_than_its_sequence() -> None:
    """So the size in the sequence header is not enough."""
    stream = streams.with_own_size(streams.first_of_a_sequence(pictures.noisy(*SIZE)), SMALL)
    data = streams.file_of(stream, SIZE, still()[1])
    with Image.open(BytesIO(data)) as image:
        red, _, blue = image.convert("RGB").resize((1, 1)).getpixel((0, 0))  # type: ignore[misc]
    with Image.open(BytesIO(made())) as image:
        expected = image.convert("RGB").resize((1, 1)).getpixel((0, 0))
    assert abs(red - expected[0]) + abs(blue - expected[2]) < 40  # type: ignore[index]
    assert avif.read(data).width == SIZE[0]


def test_of_layers_the_largest_counts() -> None:
    """An item with layers may be a small one of them. The decoder decodes them all."""
    stream, configuration = still()
    data = streams.file_of(stream, SMALL, configuration, heif.box(b"a1op", b"\0"))
    assert avif.read(data).pixels == SIZE[0] * SIZE[1]


def test_four_pictures_in_one_are_layers_and_units_have_a_limit() -> None:
    assert avif.read(of_frames(PLAIN.unit(), KEY.unit(PLAIN) * av1.MAX_FRAMES_PER_SAMPLE)).width == SIZE[0]
    assert avif.read(padded(av1.MAX_UNITS - 2)).width == SIZE[0]


@pytest.mark.parametrize(
    ("box", "position", "value"),
    [
        (b"stsz", 12, 0),  # a sample without bytes
        (b"stsz", 12, 2**31),
        (b"stsz", 8, 2**31),  # so many samples
        (b"stsc", 8, 2),  # begins behind the first chunk
        (b"stsc", 12, 0),  # a chunk without samples
        (b"stsc", 12, avif_tracks.MAX_SAMPLES + 1),
        (b"stco", 8, 2**32 - 1),
        (b"stco", 4, avif_tracks.MAX_SAMPLES + 1),
        (b"tkhd", 0, 7 << 24),
    ],
)
def test_a_track_that_contradicts_itself_is_refused(box: bytes, position: int, value: int) -> None:
    data = bytearray(animated())
    struct.pack_into(">I", data, data.index(box) + 4 + position, value)
    with pytest.raises(Permanent) as refused:
        _read_header("image/avif", bytes(data))
    assert refused.value.code == "corrupt_image"


def test_all_tracks_together_have_a_limit_of_samples_and_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a list of its own, which the reader keeps."""
    data = animated()
    start = data.index(b"trak") - 4
    (size,) = struct.unpack_from(">I", data, start)
    again = bytearray(data[: start + size] + data[start : start + size] + data[start + size :])
    at = again.index(b"moov") - 4
    struct.pack_into(">I", again, at, struct.unpack_from(">I", again, at)[0] + size)
    (samples,) = struct.unpack_from(">I", data, data.index(b"stsz") + 12)
    assert samples > 1
    monkeypatch.setattr(avif_tracks, "MAX_SAMPLES", 2 * samples - 1)
    with pytest.raises(Permanent, match="too many samples"):
        _read_header("image/avif", bytes(again))


# --- the parser against a writer of its own, and against anything

sides = st.tuples(st.integers(1, 65536), st.integers(1, 65536))
points = st.lists(
    st.tuples(st.sampled_from([0, 0x101, 0x303, 0x20F]), st.integers(0, 31), st.booleans()), min_size=1, max_size=32
).map(tuple)
sequences = st.builds(
    Sequence,
    size=sides, spare_bits=st.integers(0, 3), has_times=st.booleans(), removal_bits=st.integers(0, 32),
    equal_interval=st.none() | st.integers(0, 2**31), presentation_bits=st.integers(1, 32),
    buffer_bits=st.integers(1, 32), has_delays=st.booleans(), points=points,
    id_bits=st.none() | st.tuples(st.integers(2, 17), st.integers(1, 8)), screen_content=st.integers(0, 2),
    integer_vectors=st.integers(0, 2), order_bits=st.integers(0, 8),
)  # fmt: skip
frames = st.builds(
    Frame,
    kind=st.integers(0, 3), is_shown=st.booleans(), is_resilient=st.booleans(), has_screen_content=st.booleans(),
    size=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)), found_at=st.none() | st.integers(0, 6),
    removal_times=st.booleans(), refreshed=st.integers(0, 255), is_short=st.booleans(),
    layers=st.none() | st.sampled_from([0, 1 << 5, 1 << 3, 1 << 5 | 1 << 3]),
)  # fmt: skip


@settings(patient, max_examples=150)
@given(sequences, frames)
def test_every_form_of_the_headers_is_read_up_to_its_size(sequence: Sequence, frame: Frame) -> None:
    intra = frame.kind in (streams.KEY, streams.INTRA_ONLY)
    resilient = frame.is_resilient or frame.kind == streams.SWITCH or (frame.kind == streams.KEY and frame.is_shown)
    assume(frame.found_at is None or not (intra or resilient))
    assume(frame.size is None or max(frame.size) <= 1 << min(sequence.side_bits))
    stream = av1.Stream()
    first = Sequence((1, 1))
    stream.read(first.unit() + KEY.unit(first))
    stream.read(sequence.unit() + frame.unit(sequence))
    found = (1, 1) if frame.found_at is not None else frame.size or sequence.size
    assert (stream.width, stream.height) == found
    assert stream.frames == 2


def refused_or_read(data: bytes) -> None:
    """Anything else than a header or a refusal is an error of the test."""
    with suppress(Permanent):
        _read_header("image/avif", data)


@settings(patient, max_examples=150)
@given(st.binary(max_size=300))
def test_any_bytes_as_a_stream_are_read_or_refused(stream: bytes) -> None:
    refused_or_read(streams.file_of(PLAIN.unit() + stream, SIZE))


@settings(patient, max_examples=300)
@given(st.sampled_from(sorted(REAL)), st.data())
def test_any_change_of_a_real_file_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """With a few bits changed, and the end cut off."""
    changed = bytearray(REAL[name])
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, min(len(changed), 1500) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    refused_or_read(bytes(changed[: data.draw(st.integers(16, len(changed)))]))
