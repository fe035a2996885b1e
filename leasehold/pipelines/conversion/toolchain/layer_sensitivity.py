"""Finds the layers that lose most accuracy in int8. The quantise step of the open toolchain (onnxruntime, without the
vendor's tools) needs these layers for its report and its accuracy guard.

This module runs the float and the int8 model on the same inputs, and compares the outputs of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from leasehold.pipelines.conversion.toolchain.comparison import LARGEST_FLOAT
from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors
from leasehold.pipelines.conversion.toolchain.shapes import shape_of

#: The report of a conversion names this many of the worst layers.
REPORTED_LAYERS = 5
_MAX_NAME = 200  # the most characters of a layer's name in a report
_MAX_SAMPLES = 2  # few, because each sample costs a run of both models, with the outputs of all layers
#: The outputs of all measured layers have at most this many bytes. If they had more, the last layers of the graph are
#: left out.
_MAX_BYTES = 256 * 1024 * 1024
#: Operators that move numbers, but do not change them. Their outputs are not measured.
_MOVING_OPERATORS = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Concat", "Slice", "Split"}
#: Operators without weights. The result does not list them as layers, but their outputs are measured, for two reasons.
#: First: if the output of the layer before such an operator cannot be measured, the noise of that layer is read at the
#: operator's output. Second: the operator may make the signal smaller. Then the same noise is a larger share of the
#: signal. The noise that the next layer adds must be counted from this larger share.
_WITHOUT_WEIGHTS = {"Relu", "LeakyRelu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool"}
#: onnxruntime quantises a tensor, and then makes floats of it again. The name of the tensor with these floats ends with
#: this suffix.
_DEQUANTISED = "_DequantizeLinear_Output"


@dataclass(frozen=True, slots=True)
class NoisyLayer:
    """A layer (a node of the graph), and its noise: the difference between the float and the int8 model.

    `name`: the name of the node or, if the node has no name, of its first output. `noise`: the power of the noise in
    the layer's output, as a share of the signal's power, in the sample where this share is highest. `added`: `noise`
    minus the noise of the layer's noisiest input. `has_weights`: the node reads a constant. A node without a constant,
    such as an Add of two layers, runs in int8 if its neighbours do, even if the model says that it stays float.
    """

    name: str
    operator: str
    noise: float
    added: float
    has_weights: bool = True

    def report(self) -> dict[str, Any]:
        return {
            "layer": self.name[:_MAX_NAME],
            "operator": self.operator,
            "noise": self.noise,
            "added": self.added,
        }


def noisiest_layers(float_path: Path, int8_path: Path, inputs: Iterable[Tensors], directory: Path) -> list[NoisyLayer]:
    """All measured layers. The layer that adds most noise is the first.

    Writes a copy of each model into `directory`. The copy has the outputs of all measured layers as further outputs.
    Then runs both copies on a few samples, compares these outputs, and deletes the copies.
    """
    model = onnx.load_model(float_path, load_external_data=False)
    int8_model = onnx.load_model(int8_path, load_external_data=False)
    int8_names = _comparable_outputs(model, int8_model)
    noise = dict.fromkeys(int8_names, 0.0)
    float_exposed = _with_outputs(model, int8_names.keys(), directory / "exposed-0.onnx")
    int8_exposed = _with_outputs(int8_model, int8_names.values(), directory / "exposed-1.onnx")
    # Keep only the nodes, so that the weights are out of memory when onnxruntime loads them again.
    graph = onnx.GraphProto()
    graph.node.extend(model.graph.node)
    constants = {constant.name for constant in model.graph.initializer}
    del model, int8_model
    samples = list(islice(inputs, _MAX_SAMPLES))
    float_outputs, int8_outputs = _outputs_by_sample(float_exposed, samples), _outputs_by_sample(int8_exposed, samples)
    for reference, quantised in zip(float_outputs, int8_outputs, strict=True):
        for name, int8_name in int8_names.items():
            noise[name] = max(noise[name], _noise(reference[name], quantised[int8_name]))
    float_exposed.unlink()
    int8_exposed.unlink()
    layers: dict[str, NoisyLayer] = {}
    for layer in sorted(_layers_of(graph, noise, constants), key=lambda layer: (-layer.added, layer.name)):
        layers.setdefault(layer.name, layer)  # if a node has several outputs, the worst output counts
    return list(layers.values())


def name_of(node: onnx.NodeProto) -> str:
    """The name of a node or, if the node has no name, of its first output."""
    return node.name or next((name for name in node.output if name), "")


def _comparable_outputs(model: onnx.ModelProto, int8_model: onnx.ModelProto) -> dict[str, str]:
    """The outputs of layers that both graphs have as float tensors: name in the float graph -> name in the int8 graph.
    All these outputs together have at most _MAX_BYTES.

    An output that the int8 graph quantises is compared after it has become float again, for two reasons. First: the
    next layer reads it in this form. Second: the int8 graph may lack a Relu of the float graph. In this case
    QuantizeLinear cuts off the negative values in place of the Relu.
    """
    # QuantizeLinear outputs integers, which cannot be compared with floats.
    in_float = {name for node in int8_model.graph.node if node.op_type != "QuantizeLinear" for name in node.output}
    values = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    names, bytes_left = dict[str, str](), _MAX_BYTES
    for node in model.graph.node:
        if node.op_type in _MOVING_OPERATORS:
            continue
        for name in node.output:
            int8_name = next((found for found in (name + _DEQUANTISED, name) if found in in_float), None)
            value = values.get(name)
            if int8_name is None or value is None or value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
                continue
            bytes_left -= 4 * math.prod(shape_of(value))
            if bytes_left >= 0:
                names[name] = int8_name
    return names


def _with_outputs(model: onnx.ModelProto, names: Iterable[str], path: Path) -> Path:
    """Write the model to `path`, with the tensors `names` as further outputs. Returns `path`."""
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    path.write_bytes(model.SerializeToString())
    return path


def _outputs_by_sample(path: Path, inputs: list[Tensors]) -> list[Tensors]:
    model = Runnable(path)
    return [model.run(sample) for sample in inputs]


def _noise(reference: np.ndarray[Any, Any], quantised: np.ndarray[Any, Any]) -> float:
    """The power of the difference, as a share of the reference's power. If the reference is all zeros, the result is 0
    without a difference, and otherwise 1. Values that are NaN or infinite in the reference are left out. The result is
    LARGEST_FLOAT if the shapes differ, or if the int8 model has a NaN or infinite value where the reference has a
    finite value.
    """
    if reference.shape != quantised.shape:
        return LARGEST_FLOAT
    is_finite = np.isfinite(reference)
    expected, answer = (side[is_finite].astype(np.float64) for side in (reference, quantised))
    if not np.isfinite(answer).all():
        return LARGEST_FLOAT
    signal, error = float(np.sum(np.square(expected))), float(np.sum(np.square(expected - answer)))
    return error / signal if signal else float(error > 0)


def _layers_of(graph: onnx.GraphProto, noise: dict[str, float], constants: set[str]) -> list[NoisyLayer]:
    """The measured layers. `noise`: measured output -> its noise. `constants`: the names of the weights.

    An output that is not measured counts with the noise of the noisiest input of its node. The function goes through
    the nodes in their order. If the output of a layer is not measured, the function remembers the layer (`unmeasured`),
    and reads its noise at the first measured output behind it.

    An example is a Relu after a convolution. The int8 graph has no such Relu. There, the convolution's output has the
    name of the Relu's output, and QuantizeLinear cuts off the negative values. So only the Relu's output is measured,
    and its noise counts as the noise of the convolution.
    """
    noise_of: dict[str, float] = {}
    unmeasured: dict[str, onnx.NodeProto] = {}  # an output that is not measured -> its layer
    layers = []
    for node in graph.node:
        input_noise = max((noise_of.get(name, 0.0) for name in node.input), default=0.0)
        layer: onnx.NodeProto | None = node  # the layer whose noise is read at the outputs of `node`
        if node.op_type in _MOVING_OPERATORS | _WITHOUT_WEIGHTS:
            # `node` is no layer itself, but the noise of an unmeasured layer before it may be read at its output. None:
            # there is no unmeasured layer before `node`.
            layer = next((unmeasured[name] for name in node.input if name in unmeasured), None)
        for name in node.output:
            noise_of[name] = noise.get(name, input_noise)
            if layer is None:
                continue
            if name in noise:
                added, has_weights = noise[name] - input_noise, not constants.isdisjoint(layer.input)
                layers.append(NoisyLayer(name_of(layer), layer.op_type, noise[name], added, has_weights))
            else:
                unmeasured[name] = layer
    return layers
