"""Makes a model of ResNet-50's shape with random weights of a seed. At full width: 25.6 million, 102 MB."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

SIDE = 224
CLASSES = 1000
WIDTH = 64
#: The stages: blocks, inner channels as a multiple of the width, stride of the first block.
_STAGES = ((3, 1, 1), (4, 2, 2), (6, 4, 2), (3, 8, 2))
_EXPANSION = 4
_OPSET = 13


class _Network:
    """Collects the nodes and the weights of the model."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, value: np.ndarray[Any, Any]) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value.astype(np.float32), name))
        return name

    def random_weight(self, *shape: int, fan_in: int) -> str:
        return self.weight(self._rng.standard_normal(shape, np.float32) * np.float32((2 / fan_in) ** 0.5))

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def convolution(
        self, x: str, channels: int, out_channels: int, side: int, *, stride: int = 1, gain: float = 1.0
    ) -> str:
        """A convolution without bias, and the normalisation that an optimiser folds into it."""
        pads = [side // 2] * 4
        kernel = self.random_weight(out_channels, channels, side, side, fan_in=channels * side * side)
        x = self.add("Conv", x, kernel, kernel_shape=[side, side], strides=[stride, stride], pads=pads)
        scale, shift = np.full(out_channels, gain), self._rng.standard_normal(out_channels) * 0.05
        mean, variance = np.zeros(out_channels), np.ones(out_channels)
        return self.add("BatchNormalization", x, *(self.weight(value) for value in (scale, shift, mean, variance)))

    def block(self, x: str, channels: int, inner: int, stride: int) -> str:
        y = self.add("Relu", self.convolution(x, channels, inner, 1))
        y = self.add("Relu", self.convolution(y, inner, inner, 3, stride=stride))
        y = self.convolution(y, inner, inner * _EXPANSION, 1, gain=0.3)
        if stride != 1 or channels != inner * _EXPANSION:
            x = self.convolution(x, channels, inner * _EXPANSION, 1, stride=stride)
        return self.add("Relu", self.add("Add", x, y))


def resnet(width: int = WIDTH, seed: int = 1) -> bytes:
    """The model's file. The same width and seed give the same bytes."""
    net = _Network(seed)
    x = net.add("Relu", net.convolution("x", 3, width, 7, stride=2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = width
    for blocks, factor, stride in _STAGES:
        inner = factor * width
        for number in range(blocks):
            x = net.block(x, channels, inner, stride if number == 0 else 1)
            channels = inner * _EXPANSION
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    dense = net.random_weight(channels, CLASSES, fan_in=channels)
    net.nodes.append(helper.make_node("Gemm", [x, dense, net.weight(np.zeros(CLASSES))], ["y"]))
    graph = helper.make_graph(
        net.nodes,
        "resnet",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        net.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    return bytes(model.SerializeToString())


def pictures(count: int, *, seed: int = 2) -> list[bytes]:
    """PNG files of soft coloured patches. Each picture is different, but neighbouring pixels are similar."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        stream = io.BytesIO()
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stream, "PNG")
        files.append(stream.getvalue())
    return files
