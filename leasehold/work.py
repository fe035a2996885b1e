"""What the handler of an isolated step is given: plain files and parameters, nothing that reaches outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt at one isolated step, inside its child process.

    `files`: what the step reads, already downloaded and checked, by output or input name. `directory`: empty and
    the attempt's own; outputs are written there. `params`: an instance of the pipeline's params model.
    """

    pipeline: str
    step: str
    params: Any
    files: Mapping[str, Path]
    directory: Path
