"""Pictures that cannot succeed are refused with a stable code, before they cost anything."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from leasehold.pipelines.media.headers import jpeg
from tests import pictures
from tests.unit.media.conftest import RefusalOf, RunMedia


def test_an_empty_file_is_refused(refusal_of: RefusalOf) -> None:
    assert refusal_of(b"") == "empty_file"


@pytest.mark.parametrize(
    "data",
    [
        b"hello, world" * 10,
        b"%PDF-1.7\n" + b"\0" * 64,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"8BPS\0\1" + b"\0" * 64,
        b"II+\0" + bytes(100),
        b"\0\0\0\x18ftypisom\0\0\0\0mp41avc1" + b"\0" * 64,
        b"\xff",
    ],
    ids=["text", "pdf", "svg", "psd", "bigtiff", "mp4", "one byte"],
)
def test_other_kinds_are_refused(refusal_of: RefusalOf, data: bytes) -> None:
    assert refusal_of(data) == "unsupported_format"


def test_a_jpeg_of_a_rare_coding_process_is_refused_as_unsupported(refusal_of: RefusalOf) -> None:
    data = pictures.encoded(pictures.corners(), "JPEG").replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c")
    assert refusal_of(data) == "unsupported_format"


def test_a_picture_that_is_not_what_was_declared_is_refused(refusal_of: RefusalOf) -> None:
    assert refusal_of(pictures.sample("image/png"), content_type="image/jpeg") == "mislabelled"


def test_without_a_declaration_the_real_kind_counts(run_media: RunMedia) -> None:
    assert run_media(pictures.sample("image/png")).value["original"]["content_type"] == "image/png"


@pytest.mark.parametrize("content_type", pictures.KINDS)
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.7, 0.95])
def test_a_truncated_picture_is_refused_as_corrupt(refusal_of: RefusalOf, content_type: str, kept: float) -> None:
    data = pictures.sample(content_type)
    assert refusal_of(data[: max(16, int(len(data) * kept))]) == "corrupt_image"


def test_a_png_with_damaged_pixels_is_refused_as_corrupt(refusal_of: RefusalOf) -> None:
    data = bytearray(pictures.sample("image/png"))
    at = data.index(b"IDAT") + 40
    data[at : at + 8] = b"\xaa" * 8
    assert refusal_of(bytes(data)) == "corrupt_image"


@pytest.mark.parametrize(("width", "height"), [(0, 10), (10, 0)])
def test_a_picture_without_area_is_refused_as_corrupt(refusal_of: RefusalOf, width: int, height: int) -> None:
    assert refusal_of(pictures.png(width, height, 8, 0, b"\0")) == "corrupt_image"


def test_more_bytes_than_the_limit_are_refused(refusal_of: RefusalOf) -> None:
    data = pictures.sample("image/png")
    assert refusal_of(data, limits={"max_bytes": len(data) - 1}) == "too_large"


@pytest.mark.parametrize("content_type", pictures.KINDS)
def test_more_pixels_than_the_limit_are_refused(refusal_of: RefusalOf, content_type: str) -> None:
    assert refusal_of(pictures.sample(content_type), limits={"max_pixels": 1000}) == "too_many_pixels"


@pytest.mark.parametrize("content_type", pictures.KINDS)
def test_exactly_the_limits_are_accepted(run_media: RunMedia, content_type: str) -> None:
    data = pictures.sample(content_type)
    facts = run_media(data).value["original"]
    area = facts["width"] * facts["height"]
    limits = {
        "max_bytes": len(data),
        "max_pixels": area,
        "max_total_pixels": area * facts["frames"],
        "max_frames": facts["frames"],
    }
    assert run_media(data, limits=limits).value["original"] == facts


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_more_frames_than_the_limit_are_refused(refusal_of: RefusalOf, kind: str) -> None:
    data = pictures.animated(kind, [100] * 4)
    assert refusal_of(data, limits={"max_frames": 3}) == "too_many_frames"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_frames_count_together(refusal_of: RefusalOf, kind: str) -> None:
    data = pictures.animated(kind, [100] * 4)
    assert refusal_of(data, limits={"max_total_pixels": 4 * 48 * 32 - 1}) == "too_many_pixels"


def jpeg_of_many_scans(scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = pictures.encoded(pictures.corners(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + b"\xff\xd9"


def test_a_progressive_jpeg_of_endless_scans_is_refused(refusal_of: RefusalOf) -> None:
    assert refusal_of(jpeg_of_many_scans(jpeg.MAX_SCANS + 1)) == "too_many_scans"


def bombs() -> dict[str, tuple[bytes, str]]:
    """Small files that claim, or decode to, far more than is accepted; and how each is refused."""
    side = 20_000
    gif = bytearray(pictures.animated("GIF", [100, 100]))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    gif_frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    jpeg_file = bytearray(pictures.encoded(pictures.corners(), "JPEG"))
    at = jpeg_file.index(b"\xff\xc0")
    jpeg_file[at + 5 : at + 9] = struct.pack(">HH", 65535, 65535)
    webp = bytearray(pictures.animated("WEBP", [100, 100]))
    webp[24:30] = b"\xff\x3f\x00\xff\x3f\x00"
    avif = bytearray(pictures.sample("image/avif"))
    at = avif.index(b"ispe")
    avif[at + 8 : at + 16] = struct.pack(">II", 60_000, 60_000)
    apng = pictures.animated("PNG", [100, 100])
    at = apng.index(b"acTL") - 4
    endless = apng[:at] + pictures.png_chunk(b"acTL", struct.pack(">II", 4_000_000, 0)) + apng[at + 20 :]
    profile = b"bomb\0\0" + zlib.compress(b"\0" * 100_000_000, 9)
    words = b"Comment\0\0" + zlib.compress(b"\0" * 100_000_000, 9)
    return {
        "png of a gigapixel": (pictures.png(side, side, 1, 0, b"\0" * (side // 8 + 1) * side), "too_many_pixels"),
        "png that claims all": (pictures.png(2**31 - 1, 2**31 - 1, 8, 6, b"\0"), "too_many_pixels"),
        "jpeg": (bytes(jpeg_file), "too_many_pixels"),
        "gif": (bytes(gif), "too_many_pixels"),
        "webp": (bytes(webp), "too_many_pixels"),
        "avif": (bytes(avif), "too_many_pixels"),
        "gif frames": (b"GIF89a\1\0\1\0\0\0\0" + gif_frame * 40_000 + b";", "too_many_frames"),
        "apng frames": (endless, "too_many_frames"),
        "png profile": (pictures.png(1, 1, 8, 0, b"\0\0", pictures.png_chunk(b"iCCP", profile)), "corrupt_image"),
        "png words": (pictures.png(1, 1, 8, 0, b"\0\0", pictures.png_chunk(b"zTXt", words)), "corrupt_image"),
        "gif crumbs": (b"GIF89a\1\0\1\0\0\0\0!\xfe" + b"\1a" * 2_000_000, "corrupt_image"),
        "gif of empty blocks": (b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\0" * 1_000_000, "corrupt_image"),
        "jpeg of fill bytes": (b"\xff\xd8" + b"\xff" * 4_000_000, "corrupt_image"),
    }


# Room for reading the file itself, not for decoding any of the pictures.
_IN_LITTLE_MEMORY = """
import json, pathlib, resource, sys
from leasehold.domain.errors import Permanent
from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import resize
held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 40 * 2**20,) * 2)
refused = {}
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        resize(Work("media", "resize", MediaParams(), {"original": path}, path.parent))
    except (Permanent, MemoryError) as error:
        refused[path.name] = getattr(error, "code", "MemoryError")
print(json.dumps(refused))
"""


def test_bombs_are_refused_without_being_decoded(tmp_path: Path) -> None:
    """A process with 40 MiB to spare names every one of them, where a decoder would run out of memory."""
    made = bombs()
    for name, (data, _) in made.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", _IN_LITTLE_MEMORY, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    refused = json.loads(ran.stdout)
    assert refused == {name: code for name, (_, code) in made.items()}


def test_a_lack_of_memory_is_not_blamed_on_the_picture(tmp_path: Path) -> None:
    """The sandbox decides what a MemoryError means, so it must come out as one."""
    large = Image.new("RGB", (4000, 4000), pictures.BLUE)
    for kind in ("PNG", "JPEG", "WEBP", "AVIF"):
        options = {"speed": 10} if kind == "AVIF" else {}
        (tmp_path / kind).write_bytes(pictures.encoded(large, kind, **options))
    command = [sys.executable, "-c", _IN_LITTLE_MEMORY, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    refused = json.loads(ran.stdout)
    assert set(refused.values()) == {"MemoryError"}
