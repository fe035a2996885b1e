"""Static int8 quantisation: QDQ, per channel, calibrated by the smallest and largest value seen."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from leasehold.domain.errors import StepError
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.running import Tensors


class _Reader:
    """A CalibrationDataReader, as onnxruntime asks for it: None ends the data."""

    def __init__(self, samples: list[Tensors], heard: Callable[[int], None]) -> None:
        self._left = iter(enumerate(samples))
        self._heard = heard

    def get_next(self) -> Tensors | None:
        place, sample = next(self._left, (0, None))
        if sample is not None:
            self._heard(place)
        return sample


def quantised(source: Path, target: Path, samples: list[Tensors], heard: Callable[[int], None]) -> None:
    """Write the int8 model. `heard` is called with the number of each sample as it is run.

    Raises Permanent("not_quantisable").
    """
    logging.getLogger().setLevel(logging.ERROR)  # it advises, on the root logger, what the step before has done
    options: dict[str, Any] = {"WeightSymmetric": True, "ActivationSymmetric": False}
    own = target.with_name("float.onnx")
    shutil.copyfile(source, own)  # onnxruntime writes beside the model that it reads, which is only to be read
    try:
        quantize_static(
            own,
            target,
            _Reader(samples, heard),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Weights of 7 bits: without VNNI a processor adds two products with 8-bit ones in 16 bits, which overflow,
            # and the model would answer otherwise there (onnxruntime's page on quantisation).
            reduce_range=True,
            extra_options=options,
        )
    except (MemoryError, StepError):
        raise
    except Exception as error:
        raise refusals.not_quantisable(f"{type(error).__name__} {error}".partition("\n")[0]) from error
    finally:
        own.unlink()
