"""What the API learns about pictures, without an image library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leasehold.pipelines.media.kinds import HEAD_BYTES, is_as_declared, sniff
from tests import pictures


@pytest.mark.parametrize("content_type", pictures.KINDS)
def test_every_accepted_kind_is_told_by_its_first_bytes(content_type: str) -> None:
    assert sniff(pictures.sample(content_type)[:HEAD_BYTES]) == content_type


def test_an_avif_sequence_is_told_too() -> None:
    assert sniff(pictures.animated("AVIF", [100, 100], speed=10)[:HEAD_BYTES]) == "image/avif"


@pytest.mark.parametrize(
    "head",
    [b"", b"\xff\xd8", b"\x89PNG", b"RIFF\0\0\0\0WAVE", b"II+\0", b"BMW", b"\0\0\0\x14ftypisom\0\0\0\0mp41", b"GIF88a"],
)
def test_anything_else_is_nothing(head: bytes) -> None:
    assert sniff(head) is None


def test_a_generic_heif_file_that_lists_avif_is_avif() -> None:
    assert sniff(b"\0\0\0\x18ftypmif1\0\0\0\0miafavif") == "image/avif"
    assert sniff(b"\0\0\0\x18ftypmif1\0\0\0\0miafheic") == "image/heic"
    assert sniff(b"\0\0\0\x18ftypmif1\0\0\0\0miafmif1") is None


def test_heic_may_be_called_by_the_name_of_its_container_and_nothing_else() -> None:
    assert is_as_declared("image/heif", "image/heic")
    assert not is_as_declared("image/heif", "image/avif")
    assert not is_as_declared("image/jpeg", "image/heic")


def test_the_declaration_needs_no_image_library() -> None:
    """The API's image carries none."""
    code = "import sys\nfrom leasehold.pipelines.media import kinds, pipeline, variants\nsys.exit('PIL' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
