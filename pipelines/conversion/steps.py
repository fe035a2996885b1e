"""The handlers of the conversion pipeline: each hands its work to the job's toolchain. Heavy: only the child process
of a worker imports it.
"""

from __future__ import annotations

from types import ModuleType

from leasehold.verdicts import Done
from leasehold.work import Work
from pipelines.conversion import kneron, open_toolchain
from pipelines.conversion.pipeline import conversion

_TOOLCHAINS: dict[str, ModuleType] = {"open": open_toolchain, "kneron": kneron}


@conversion.handles("onnx")
def optimise_model(work: Work) -> Done:
    done: Done = _TOOLCHAINS[work.params.toolchain].optimise(work)
    return done


@conversion.handles("bie")
def quantise_model(work: Work) -> Done:
    done: Done = _TOOLCHAINS[work.params.toolchain].quantise(work)
    return done


@conversion.handles("nef")
def package_model(work: Work) -> Done:
    done: Done = _TOOLCHAINS[work.params.toolchain].package(work)
    return done
