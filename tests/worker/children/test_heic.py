"""HEIC is decoded behind all fences, by a library that likes to start threads."""

from __future__ import annotations

from pathlib import Path

from leasehold.pipelines.media import heic_decoder
from leasehold.pipelines.media.pipeline import media
from leasehold.worker.sandbox.children import Children
from tests import heif
from tests.support.not_here import only_where

pytestmark = only_where(heic_decoder.load_decoder(), "the extra heic")


async def test_a_photo_of_tiles_is_decoded_behind_the_fences(tmp_path: Path) -> None:
    made = heif.Heif(primary=5)
    tiles = [made.still(one) for one in (heif.RED_TILE, heif.GREEN_TILE, heif.BLUE_TILE, heif.YELLOW_TILE)]
    made.grid(2, 2, (128, 128), tiles, heif.turned(1))
    run = tmp_path / "work" / "run"
    (run / "in").mkdir(parents=True)
    (run / "out").mkdir()
    original = run / "in" / "original"
    original.write_bytes(made.build())
    children = Children(1, pipelines=["media"], work_dir=tmp_path / "work")
    await children.start()
    try:
        done = await children.run(
            pipeline="media",
            step="resize",
            params={"content_type": "image/heic"},
            files={"original": original},
            directory=run / "out",
            timeout=120,
            limits=media.steps[0].limits,
        )
    finally:
        await children.close()
    assert done.value == {
        "original": {
            "width": 128, "height": 128, "bytes": original.stat().st_size, "content_type": "image/heic", "frames": 1,
            "has_alpha": False,
        },
        "width": 128,
        "height": 128,
    }  # fmt: skip
