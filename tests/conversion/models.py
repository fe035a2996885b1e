"""Models for the tests, drawn from a seed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image


def network(*, opset: int = 17, side: int = 16, classes: int = 5, seed: int = 1) -> onnx.ModelProto:
    """A small picture classifier: two convolutions, a pool and a dense layer; an Identity for the optimiser to drop."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.standard_normal((8, 3, 3, 3)) * 0.3,
        "b1": rng.standard_normal(8) * 0.1,
        "w2": rng.standard_normal((16, 8, 3, 3)) * 0.2,
        "w3": rng.standard_normal((16, classes)) * 2,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Identity", ["r1"], ["i1"]),
        helper.make_node("Conv", ["i1", "w2"], ["c2"], strides=[2, 2]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["y"]),
    ]
    return model_of(
        nodes,
        inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, side, side])],
        outputs=[helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", classes])],
        weights=[numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
        opset=opset,
    )


def model_of(
    nodes: list[onnx.NodeProto], *, inputs: Any = None, outputs: Any = None, weights: Any = (), opset: int = 17
) -> onnx.ModelProto:
    """A model of `nodes`, by default from x to y, four floats each."""
    inputs = inputs or [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])]
    outputs = outputs or [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def saved(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def pictures(path: Path, count: int, *, side: int = 40, seed: int = 2) -> Path:
    """An archive of noise pictures, as the API stores them."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        stream = io.BytesIO()
        tint = rng.integers(20, 235, 3)
        pixels = np.clip(rng.integers(-20, 20, (side, side, 3)) + tint, 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(stream, "PNG")
        made.append(stream.getvalue())
    return archive(path, made)


def archive(path: Path, files: list[bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for number, data in enumerate(files):
            member = tarfile.TarInfo(str(number))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path
