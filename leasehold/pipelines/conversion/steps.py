"""The handlers of the conversion pipeline. Each handler calls the toolchain that the job names. `open` is our own
toolchain, which uses open-source libraries. `kneron` is the chip vendor's toolchain. Two names come from the vendor:
BIE for the int8 model, and NEF for the package that a chip loads.

Only a worker's child process imports this module, because the toolchains import heavy libraries.
"""

from __future__ import annotations

from types import ModuleType

from google.protobuf.message import EncodeError

from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.conversion.toolchain import kneron, open_toolchain, refusals
from leasehold.pipelines.conversion.toolchain.loading import check_size

_TOOLCHAINS: dict[str, ModuleType] = {"open": open_toolchain, "kneron": kneron}


@conversion.handles("onnx")
def optimise_model(work: Work) -> Done:
    check_size(work.files["model"], work.params.limits)  # before any tool reads the file
    return _run_toolchain(work, "optimise")


@conversion.handles("bie")
def quantise_model(work: Work) -> Done:
    return _run_toolchain(work, "quantise")


@conversion.handles("nef")
def package_model(work: Work) -> Done:
    return _run_toolchain(work, "package")


def _run_toolchain(work: Work, operation: str) -> Done:
    try:
        outcome: Done = getattr(_TOOLCHAINS[work.params.toolchain], operation)(work)
    except EncodeError as error:  # shape inference, the converter or our own code could not serialise the model
        raise refusals.not_serialisable() from error
    return outcome
