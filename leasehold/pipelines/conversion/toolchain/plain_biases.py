"""Rewrites the biases of Gemm nodes into the form that onnxruntime can quantise.

A Gemm node multiplies two matrices and adds a bias to the product. ONNX allows a bias of any shape that fits the
product, and a factor `beta` of the bias. But onnxruntime's quantiser expects a bias with one value for each column of
the product, and ignores `beta`. A model may have biases of other shapes from its author or from onnxslim, which fuses a
MatMul with an Add of any shape.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

_BIAS = 2  # the index of the bias among the inputs of a Gemm


def make_biases_plain(model: onnx.ModelProto) -> None:
    """Change the model so that the constant bias of each Gemm has one value for each column, and the Gemm has no
    `beta`. If that is impossible, the Gemm loses its bias, and an Add after the Gemm adds it. A Gemm whose bias is not
    a constant stays as it is.
    """
    constants = {constant.name: constant for constant in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type != "Gemm" or len(node.input) <= _BIAS or node.input[_BIAS] not in constants:
            continue
        bias = numpy_helper.to_array(constants[node.input[_BIAS]])
        columns = _columns_of(node, constants)
        beta = _take_attribute(node, "beta", 1.0)
        scaled = (bias * beta).astype(bias.dtype)
        name = f"{node.output[0]}_plain_bias"
        # If the bias differs between rows, or if the number of columns is unknown, a separate node adds the bias.
        if columns is None or (bias.ndim > 1 and bias.shape[0] != 1):
            product = f"{node.output[0]}_without_bias"
            nodes.append(helper.make_node("Add", [product, name], [node.output[0]], name=f"{node.name}_bias"))
            node.output[0] = product
            del node.input[_BIAS:]
        elif beta == 1.0 and bias.shape == (columns,):  # the bias has the right form already
            continue
        else:
            scaled = np.broadcast_to(scaled.reshape(-1), (columns,)).copy()
            node.input[_BIAS] = name
        model.graph.initializer.append(numpy_helper.from_array(scaled, name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _columns_of(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> int | None:
    """The number of columns of the product. None: the number is unknown, because the right matrix is computed."""
    weights = constants.get(node.input[1])
    if weights is None:
        return None
    is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    return int(weights.dims[0 if is_transposed else 1])


def _take_attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """Remove the attribute from the node, and return its value, or `default` if the node has no such attribute."""
    found = next((attribute for attribute in node.attribute if attribute.name == name), None)
    if found is None:
        return default
    node.attribute.remove(found)
    return float(found.f)
