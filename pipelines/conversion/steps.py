"""The handlers of the conversion pipeline: each hands its work to the job's toolchain. Heavy: only the child process
of a worker imports it.
"""

from __future__ import annotations

import ctypes
import gc
from types import ModuleType

from leasehold.verdicts import Done
from leasehold.work import Work
from pipelines.conversion import kneron, open_toolchain
from pipelines.conversion.pipeline import conversion

_TOOLCHAINS: dict[str, ModuleType] = {"open": open_toolchain, "kneron": kneron}


@conversion.handles("onnx")
def optimise_model(work: Work) -> Done:
    return _performed(work, "optimise")


@conversion.handles("bie")
def quantise_model(work: Work) -> Done:
    return _performed(work, "quantise")


@conversion.handles("nef")
def package_model(work: Work) -> Done:
    return _performed(work, "package")


def _performed(work: Work, act: str) -> Done:
    try:
        done: Done = getattr(_TOOLCHAINS[work.params.toolchain], act)(work)
        return done
    finally:
        _give_back()


def _give_back() -> None:
    """Hundreds of megabytes were freed: with the kernel they make no child look worn, whose successor takes seconds
    to load.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)
