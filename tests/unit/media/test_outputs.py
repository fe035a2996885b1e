"""What the outputs are made of: nothing private, and the same bytes every time."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import FINAL, RESIZED, webp
from leasehold.pipelines.media.variants import VARIANTS
from tests import pictures
from tests.unit.media.conftest import Outputs, RunMedia

ALL = tuple(VARIANTS)
SECRETS = (b"Paris", b"GPS", b"Exif", b"http://ns.adobe.com/xap", b"rdf:RDF", b"ICC_PROFILE", b"ICCP", b"iCCP", b"EXIF")


def hashes(outputs: Outputs) -> dict[str, str]:
    return {name: hashlib.sha256(outputs.read(name)).hexdigest() for name in outputs.files if name != "original"}


def told_exif() -> Image.Exif:
    made = pictures.exif(1)
    made[0x010E] = "Paris"
    made[0x8825] = {1: "N", 2: (48.0, 51.0, 30.0), 3: "E", 4: (2.0, 21.0, 8.0)}
    return made


def test_what_a_step_makes_does_not_depend_on_what_its_process_made_before(run_media: RunMedia, tmp_path: Path) -> None:
    outputs = run_media(pictures.encoded(pictures.noisy(), "JPEG"))
    resized = tmp_path / "elsewhere.jpg"
    resized.write_bytes(outputs.read(RESIZED))
    final = outputs.read(FINAL)
    for before in (pictures.noisy().rotate(90), pictures.with_alpha()):
        run_media(pictures.encoded(before, "PNG"))
        webp(Work("media", "webp", MediaParams(), {RESIZED: resized}, tmp_path))
        assert (tmp_path / FINAL).read_bytes() == final


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_no_metadata_reaches_an_output(run_media: RunMedia, kind: str) -> None:
    xmp = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'><rdf:RDF>Paris http://ns.adobe.com/xap/1.0/</rdf:RDF></x:xmpmeta>"
    data = pictures.encoded(
        pictures.with_alpha() if kind != "JPEG" else pictures.noisy(), kind,
        exif=told_exif(), icc_profile=pictures.display_p3(), xmp=xmp, comment=b"Paris", dpi=(300, 300),
    )  # fmt: skip
    assert b"Paris" in data
    outputs = run_media(data, variants=ALL)
    for name in set(outputs.files) - {"original"}:
        content = outputs.read(name)
        assert [secret for secret in SECRETS if secret in content] == [], name
        told = set(outputs.image(name).info)
        assert told <= {"jfif", "jfif_version", "jfif_unit", "jfif_density", "progressive", "progression", "loop",
                        "background"}, name  # fmt: skip


def test_the_comment_of_a_gif_is_left_out(run_media: RunMedia) -> None:
    outputs = run_media(pictures.animated("GIF", [100, 100], comment=b"Paris"))
    assert all(b"Paris" not in outputs.read(name) for name in set(outputs.files) - {"original"})


@pytest.mark.parametrize("content_type", pictures.KINDS)
def test_two_runs_give_the_same_bytes(run_media: RunMedia, content_type: str) -> None:
    data = pictures.sample(content_type)
    assert hashes(run_media(data, variants=ALL)) == hashes(run_media(data, variants=ALL))


_ELSEWHERE = """
import hashlib, json, pathlib, sys
from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import compress, resize, webp
files = {"original": pathlib.Path(sys.argv[1])}
for step in (resize, compress, webp):
    params = MediaParams(variants=tuple(sys.argv[3:]))
    work = Work("media", step.__name__, params, dict(files), pathlib.Path(sys.argv[2]))
    files |= {name: file.path for name, file in step(work).files.items()}
del files["original"]
print(json.dumps({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}))
"""


@pytest.mark.parametrize("content_type", ["image/jpeg", "image/png", "image/gif"])
def test_another_process_gives_the_same_bytes(run_media: RunMedia, tmp_path: Path, content_type: str) -> None:
    here = run_media(pictures.sample(content_type), variants=ALL)
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    command = [sys.executable, "-c", _ELSEWHERE, str(here.files["original"]), str(directory), *ALL]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert json.loads(ran.stdout) == hashes(here)


def test_the_outputs_of_a_photo_are_the_three_promised_ones(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.noisy(), "JPEG"))
    assert outputs.content_types == {
        "resize.jpg": "image/jpeg",
        "compress.jpg": "image/jpeg",
        "final.webp": "image/webp",
    }
    assert outputs.image("compress.jpg").info.get("progressive")


def test_what_is_told_about_the_original(run_media: RunMedia) -> None:
    data = pictures.encoded(pictures.noisy(1000, 500), "JPEG", exif=pictures.exif(6))
    assert run_media(data, max_side=100).value == {
        "original": {
            "width": 500,
            "height": 1000,
            "bytes": len(data),
            "content_type": "image/jpeg",
            "frames": 1,
            "has_alpha": False,
        },
        "width": 50,
        "height": 100,
    }


def test_every_variant_is_what_its_declaration_says(run_media: RunMedia) -> None:
    outputs = run_media(pictures.encoded(pictures.with_alpha(2000, 1000), "PNG"), variants=ALL)
    for variant in VARIANTS.values():
        image = outputs.image(variant.output)
        assert outputs.content_types[variant.output] == variant.content_type == Image.MIME[str(image.format)]
        assert image.width == (variant.max_side or 2000)
        assert image.convert("RGBA").getchannel("A").getpixel((image.width - 5, 5)) == 0


def test_the_final_webp_is_named_last_so_that_it_proves_the_variants(run_media: RunMedia) -> None:
    assert list(run_media(pictures.sample("image/png"), variants=ALL).files)[-1] == "final.webp"


def test_stills_of_an_animation_show_its_first_frame(run_media: RunMedia) -> None:
    outputs = run_media(pictures.animated("GIF", [100, 100, 100]), variants=("png", "avif"))
    for name in ("variants/full.png", "variants/full.avif"):
        image = outputs.image(name)
        assert getattr(image, "n_frames", 1) == 1
        assert image.size == (48, 32)


def test_asking_for_the_same_variants_in_another_order_is_the_same_request() -> None:
    assert MediaParams(variants=("avif", "thumb", "avif")) == MediaParams(variants=("thumb", "avif"))


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variants"):
        MediaParams.model_validate({"variants": ["huge"]})


_CRAMPED = """
import resource, sys
from pathlib import Path
from leasehold.pipelines.media import encode
from tests import pictures

whole = encode.write(pictures.noisy(), Path(sys.argv[1]), encode.SMALL_JPEG).path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (whole - 10, whole - 10))
try:
    encode.write(pictures.noisy(), Path(sys.argv[2]), encode.SMALL_JPEG)
except OSError as error:
    print(error.errno)
"""


def test_a_disk_that_takes_all_but_the_end_is_an_error_and_not_a_truncated_picture(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CRAMPED, str(tmp_path / "whole.jpg"), str(tmp_path / "cut.jpg")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert said.stdout.strip() == str(errno.EFBIG)
