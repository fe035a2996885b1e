"""Which layers int8 hurts most: float and int8 run side by side, and every layer's answer is compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors
from leasehold.pipelines.conversion.toolchain.shapes import shape_of

_WORST = 5
_SAMPLES = 2
#: Layers beyond this many bytes of answers are not looked at, the last of the graph first to be left out.
_MAX_BYTES = 256 * 1024 * 1024
#: They only move numbers about.
_PASSIVE = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Concat", "Slice", "Split"}
#: They have no weights to be hurt: what is left of a signal is smaller behind them, and its noise a larger share.
_BLAMELESS = {"Relu", "LeakyRelu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool"}


def worst_layers(real: Path, fixed: Path, given: list[Tensors], directory: Path) -> list[dict[str, Any]]:
    """The layers that add most noise, the worst first.

    `noise`: of the layer's answer, as a share of its signal's power; `added`: beyond the noisiest of its inputs.
    """
    model = onnx.load_model(real, load_external_data=False)
    made = onnx.load_model(fixed, load_external_data=False)
    names = _comparable(model, made)
    noise = dict.fromkeys(names, 0.0)
    exposed = [_exposed(one, names, directory / f"exposed-{n}.onnx") for n, one in enumerate((model, made))]
    graph = onnx.GraphProto()
    graph.node.extend(model.graph.node)
    del model, made
    for answers in zip(*(_answers(path, given[:_SAMPLES]) for path in exposed), strict=True):
        for name in names:
            noise[name] = max(noise[name], _noise(*(answer[name] for answer in answers)))
    for path in exposed:
        path.unlink()
    layers = _added(graph, noise)
    return sorted(layers, key=lambda layer: (-layer["added"], layer["layer"]))[:_WORST]


def _comparable(model: onnx.ModelProto, made: onnx.ModelProto) -> list[str]:
    """Float answers of layers that the int8 graph has under the same name."""
    there = {name for node in made.graph.node if node.op_type != "QuantizeLinear" for name in node.output}
    known = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    names, left = [], _MAX_BYTES
    for node in model.graph.node:
        for name in node.output:
            value = known.get(name)
            if node.op_type in _PASSIVE or name not in there or value is None:
                continue
            if value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
                continue
            left -= 4 * math.prod(shape_of(value))
            if left >= 0:
                names.append(name)
    return names


def _exposed(model: onnx.ModelProto, names: list[str], path: Path) -> Path:
    """The model with those tensors as outputs."""
    outputs = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    path.write_bytes(model.SerializeToString())
    return path


def _answers(path: Path, given: list[Tensors]) -> list[Tensors]:
    model = Runnable(path)
    return [model.run(sample) for sample in given]


def _noise(real: np.ndarray[Any, Any], fixed: np.ndarray[Any, Any]) -> float:
    signal = float(np.sum(np.square(real, dtype=np.float64)))
    error = float(np.sum(np.square(real - fixed, dtype=np.float64)))
    return error / signal if signal else float(error > 0)


def _added(graph: onnx.GraphProto, noise: dict[str, float]) -> list[dict[str, Any]]:
    """Noise travels with the tensors: what is not measured has that of its noisiest input."""
    carried: dict[str, float] = {}
    layers = []
    for node in graph.node:
        before = max((carried.get(name, 0.0) for name in node.input), default=0.0)
        for name in node.output:
            carried[name] = noise.get(name, before)
            if name in noise and node.op_type not in _BLAMELESS:
                layers.append({
                    "layer": (node.name or name)[:200],
                    "operator": node.op_type,
                    "noise": noise[name],
                    "added": noise[name] - before,
                })  # fmt: skip
    return layers
