"""The three steps of the media pipeline without the platform: plain calls, local files, one warm process."""

from __future__ import annotations

import gc
import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from leasehold.domain.work import Work
from leasehold.pipelines.media.pipeline import MediaParams, media
from leasehold.pipelines.media.steps import FINAL


@dataclass(frozen=True, slots=True)
class Bare:
    """Seconds by step, and the digest of the final picture."""

    steps: Mapping[str, float]
    final_sha256: str

    @property
    def seconds(self) -> float:
        return sum(self.steps.values())


def process(original: Path, scratch: Path) -> Bare:
    """Call the three steps. A process that does nothing else calls this: its import of this module has loaded the image
    library.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        files = {"original": original}
        seconds = {}
        for step in media.steps:
            gc.collect()  # as the platform's children do between runs
            began = perf_counter()
            done = media.handlers[step.name](
                Work("media", step.name, MediaParams(content_type="image/jpeg"), dict(files), Path(directory))
            )
            seconds[step.name] = perf_counter() - began
            files |= {name: file.path for name, file in done.files.items()}
        return Bare(seconds, hashlib.sha256(files[FINAL].read_bytes()).hexdigest())
