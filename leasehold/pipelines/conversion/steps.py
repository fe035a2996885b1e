"""The handlers of the conversion pipeline: each hands its work to the job's toolchain. Heavy: only the child process
of a worker imports it.
"""

from __future__ import annotations

from types import ModuleType

from google.protobuf.message import EncodeError

from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.conversion.toolchain import kneron, open_toolchain, refusals

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
    except EncodeError as error:  # whoever hands a model on writes it first: inference, the converter, ourselves
        raise refusals.not_serialisable() from error
    return done
