"""Finds the layers that lose most accuracy in int8, for the report of the quantise step (of the open toolchain, which
uses onnxruntime instead of a vendor's tools).

It runs the float and the int8 model on the same inputs, and compares the outputs of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from leasehold.pipelines.conversion.toolchain.comparison import LARGEST_FLOAT
from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors
from leasehold.pipelines.conversion.toolchain.shapes import shape_of

_REPORTED_LAYERS = 5
_MAX_SAMPLES = 2  # each sample costs a run of both models, with the outputs of all layers
#: The outputs of all measured layers have at most this many bytes. The last layers of the graph are left out first.
_MAX_BYTES = 256 * 1024 * 1024
#: Operators that move numbers and change none. Their outputs are not measured.
_MOVING_OPERATORS = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Concat", "Slice", "Split"}
#: Operators without weights: they cannot add quantisation noise. But they can make the signal smaller, and then the
#: noise is a larger share of the signal. So their outputs are measured, but the report does not name them.
_WITHOUT_WEIGHTS = {"Relu", "LeakyRelu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool"}


def worst_layers(float_path: Path, int8_path: Path, inputs: Iterable[Tensors], directory: Path) -> list[dict[str, Any]]:
    """The layers that add most noise, the worst first. A layer's noise is that of its worst sample.

    `noise`: the power of the noise in the layer's output, as a share of the signal's power. `added`: this noise less
    the noise of the layer's noisiest input.
    """
    model = onnx.load_model(float_path, load_external_data=False)
    int8_model = onnx.load_model(int8_path, load_external_data=False)
    names = _comparable_outputs(model, int8_model)
    noise = dict.fromkeys(names, 0.0)
    float_exposed = _with_outputs(model, names, directory / "exposed-0.onnx")
    int8_exposed = _with_outputs(int8_model, names, directory / "exposed-1.onnx")
    graph = onnx.GraphProto()  # only the nodes: the weights are dropped before onnxruntime loads them again
    graph.node.extend(model.graph.node)
    del model, int8_model
    samples = list(islice(inputs, _MAX_SAMPLES))
    float_outputs, int8_outputs = _outputs_by_sample(float_exposed, samples), _outputs_by_sample(int8_exposed, samples)
    for reference, quantised in zip(float_outputs, int8_outputs, strict=True):
        for name in names:
            noise[name] = max(noise[name], _noise(reference[name], quantised[name]))
    float_exposed.unlink()
    int8_exposed.unlink()
    layers = _added_noise(graph, noise)
    return sorted(layers, key=lambda layer: (-layer["added"], layer["layer"]))[:_REPORTED_LAYERS]


def _comparable_outputs(model: onnx.ModelProto, int8_model: onnx.ModelProto) -> list[str]:
    """The names of the layers' outputs that both graphs have, in float. All together have at most _MAX_BYTES."""
    # The output of QuantizeLinear is integers, so it cannot be compared with floats.
    int8_names = {name for node in int8_model.graph.node if node.op_type != "QuantizeLinear" for name in node.output}
    values = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    names, bytes_left = [], _MAX_BYTES
    for node in model.graph.node:
        if node.op_type in _MOVING_OPERATORS:
            continue
        for name in node.output:
            value = values.get(name) if name in int8_names else None
            if value is None or value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
                continue
            bytes_left -= 4 * math.prod(shape_of(value))
            if bytes_left >= 0:
                names.append(name)
    return names


def _with_outputs(model: onnx.ModelProto, names: list[str], path: Path) -> Path:
    """Write the model to `path`, with the tensors `names` as further outputs. Returns `path`."""
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    path.write_bytes(model.SerializeToString())
    return path


def _outputs_by_sample(path: Path, inputs: list[Tensors]) -> list[Tensors]:
    model = Runnable(path)
    return [model.run(sample) for sample in inputs]


def _noise(reference: np.ndarray[Any, Any], quantised: np.ndarray[Any, Any]) -> float:
    """The power of the difference, as a share of the reference's power. If the reference is all zeros: 1, or 0 if there
    is no difference. Values that are NaN or infinite in the reference are left out. LARGEST_FLOAT: the shapes differ,
    or the int8 model has a NaN or infinite value where the reference has a finite one.
    """
    if reference.shape != quantised.shape:
        return LARGEST_FLOAT
    is_finite = np.isfinite(reference)
    expected, answer = (side[is_finite].astype(np.float64) for side in (reference, quantised))
    if not np.isfinite(answer).all():
        return LARGEST_FLOAT
    signal, error = float(np.sum(np.square(expected))), float(np.sum(np.square(expected - answer)))
    return error / signal if signal else float(error > 0)


def _added_noise(graph: onnx.GraphProto, noise: dict[str, float]) -> list[dict[str, Any]]:
    """The noise that each measured layer adds. `noise`: by the name of a measured output. An output that is not
    measured counts with the noise of the noisiest input of its node.
    """
    noise_of: dict[str, float] = {}
    layers = []
    for node in graph.node:
        input_noise = max((noise_of.get(name, 0.0) for name in node.input), default=0.0)
        for name in node.output:
            noise_of[name] = noise.get(name, input_noise)
            if name in noise and node.op_type not in _WITHOUT_WEIGHTS:
                layers.append({
                    "layer": (node.name or name)[:200],
                    "operator": node.op_type,
                    "noise": noise[name],
                    "added": noise[name] - input_noise,
                })  # fmt: skip
    return layers
