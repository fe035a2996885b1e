"""Whatever happens to a picture's bytes, the answer is an output or a refusal: never another error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from leasehold.domain.errors import Permanent
from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import resize
from tests import pictures

CASES = 60
CODES = {
    "corrupt_image",
    "unsupported_format",
    "too_many_pixels",
    "too_many_frames",
    "too_many_scans",
}


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Bytes changed, cut off, doubled or taken out, mostly near the start, where the structure is."""
    changed = bytearray(data)
    reach = dice.choice([64, 400, len(data)])
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(min(reach, len(changed)))
        way = dice.randrange(5)
        if way == 0:
            changed[at] = dice.randrange(256)
        elif way == 1:
            changed[at : at + 4] = dice.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\1"])
        elif way == 2:
            del changed[at : at + dice.randrange(1, 30)]
        elif way == 3:
            changed[at:at] = changed[at : at + dice.randrange(1, 200)]
        else:
            changed[at] ^= 1 << dice.randrange(8)
        if not changed:
            break
    if dice.random() < 0.2:
        del changed[dice.randrange(len(changed)) + 1 :]
    return bytes(changed)


@pytest.mark.parametrize("content_type", pictures.KINDS)
def test_damaged_pictures_give_an_output_or_a_refusal(tmp_path: Path, content_type: str) -> None:
    data = pictures.sample(content_type)
    refused: list[str] = []
    for seed in range(CASES):
        original = tmp_path / "original"
        original.write_bytes(damaged(data, random.Random(f"{content_type} {seed}")))
        try:
            done = resize(Work("media", "resize", MediaParams(), {"original": original}, tmp_path))
        except Permanent as refusal:
            refused.append(refusal.code)
        else:
            assert (tmp_path / "resize.jpg").stat().st_size > 0
            assert done.value is not None
    assert set(refused) <= CODES
    assert 0 < len(refused) < CASES  # or the damage proved nothing


@pytest.mark.parametrize("content_type", pictures.KINDS)
def test_the_first_bytes_of_a_kind_followed_by_noise_are_refused(tmp_path: Path, content_type: str) -> None:
    data = pictures.sample(content_type)
    for kept in (12, 16, 24, 40):
        original = tmp_path / "original"
        original.write_bytes(data[:kept] + random.Random(kept).randbytes(500))
        with pytest.raises(Permanent) as refused:
            resize(Work("media", "resize", MediaParams(), {"original": original}, tmp_path))
        assert refused.value.code in CODES
