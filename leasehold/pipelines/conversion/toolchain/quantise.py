"""Quantises a model to int8 for the open toolchain: static, QDQ, per channel, calibrated by minimum and maximum."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from leasehold.domain.errors import StepError
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.layer_sensitivity import name_of
from leasehold.pipelines.conversion.toolchain.running import Tensors


class _SampleReader:
    """The CalibrationDataReader that onnxruntime expects: `get_next` returns None after the last sample."""

    def __init__(self, samples: Iterable[Tensors], on_sample: Callable[[int], None]) -> None:
        self._samples = iter(enumerate(samples))
        self._on_sample = on_sample

    def get_next(self) -> Tensors | None:
        number, sample = next(self._samples, (0, None))
        if sample is not None:
            self._on_sample(number)
        return sample


def quantise_static(
    source: Path,
    target: Path,
    samples: Iterable[Tensors],
    on_sample: Callable[[int], None],
    *,
    ranges: Path | None = None,
    float_layers: Sequence[str] = (),
) -> None:
    """Write the int8 model to `target`. Calls `on_sample` with the number of each sample, from 0, before that
    sample runs.

    `ranges`: a file for the range of each tensor. The first call for a model runs the samples and writes the file; a
    later call reads the file and runs no sample. Without `ranges` each call runs the samples. `float_layers`: the names
    (`name_of`) of the nodes that stay float.

    Raises Permanent("not_quantisable").
    """
    # Otherwise onnxruntime would log the advice to optimise the model, which the step `onnx` has done.
    logging.getLogger().setLevel(logging.ERROR)
    options: dict[str, Any] = {"WeightSymmetric": True, "ActivationSymmetric": False}
    private_copy = target.with_name("float.onnx")
    # onnxruntime writes into the directory of its input, and the directory of `source` is read-only.
    if float_layers:
        _copy_with_names(source, private_copy)
    else:
        shutil.copyfile(source, private_copy)
    try:
        quantize_static(
            private_copy,
            target,
            _SampleReader(samples, on_sample),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Weights of 7 bits: a processor without VNNI adds two products in 16 bits, and with 8-bit weights the sum
            # overflows. The model would give other answers there (see onnxruntime's page on quantisation).
            reduce_range=True,
            nodes_to_exclude=list(float_layers),
            extra_options=options,
            calibration_cache_path=ranges,
        )
    except (MemoryError, StepError):  # a StepError of `on_sample`: the job was cancelled
        raise
    except Exception as error:
        raise refusals.not_quantisable(f"{type(error).__name__} {error}".partition("\n")[0]) from error
    finally:
        private_copy.unlink()


def _copy_with_names(source: Path, target: Path) -> None:
    """Copy the model, and name each node by `name_of`: onnxruntime finds the nodes that stay float by their names."""
    model = onnx.load_model(source, load_external_data=False)
    for node in model.graph.node:
        node.name = name_of(node)
    target.write_bytes(model.SerializeToString())
