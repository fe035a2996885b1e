"""Running the handlers on a picture, as the child process of a worker does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from leasehold.domain.errors import Permanent
from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams
from leasehold.pipelines.media.steps import compress, resize, webp


@dataclass(frozen=True)
class Outputs:
    """What the pipeline left for one picture."""

    files: dict[str, Path]
    content_types: dict[str, str]
    value: dict[str, Any]

    def read(self, name: str) -> bytes:
        return self.files[name].read_bytes()

    def image(self, name: str) -> Image.Image:
        """Opened, with all frames within reach."""
        return Image.open(BytesIO(self.read(name)))

    def frames(self, name: str) -> list[tuple[Image.Image, int]]:
        """Every frame as RGBA, and how long it is shown."""
        image, taken = self.image(name), []
        for n in range(getattr(image, "n_frames", 1)):
            image.seek(n)
            image.load()
            taken.append((image.convert("RGBA"), image.info.get("duration", 0)))
        return taken


RunMedia = Callable[..., Outputs]
RefusalOf = Callable[..., str]


@pytest.fixture
def run_media(tmp_path: Path) -> RunMedia:
    """All three steps on one original."""

    def run(data: bytes, **params: Any) -> Outputs:
        original = tmp_path / "original"
        original.write_bytes(data)
        files: dict[str, Path] = {"original": original}
        content_types: dict[str, str] = {}
        value: dict[str, Any] = {}
        for step, handler in (("resize", resize), ("compress", compress), ("webp", webp)):
            directory = tmp_path / step
            directory.mkdir(exist_ok=True)
            done = handler(Work("media", step, MediaParams(**params), dict(files), directory))
            files |= {name: file.path for name, file in done.files.items()}
            content_types |= {name: file.content_type for name, file in done.files.items()}
            value |= done.value or {}
        return Outputs(files, content_types, value)

    return run


@pytest.fixture
def refusal_of(tmp_path: Path) -> RefusalOf:
    """The stable code with which `resize` refuses a file."""

    def run(data: bytes, **params: Any) -> str:
        original = tmp_path / "original"
        original.write_bytes(data)
        with pytest.raises(Permanent) as refused:
            resize(Work("media", "resize", MediaParams(**params), {"original": original}, tmp_path))
        assert refused.value.message.endswith(".")
        return refused.value.code

    return run
