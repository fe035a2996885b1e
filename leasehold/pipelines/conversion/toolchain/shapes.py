"""Fixes and infers the shapes in a model's graph, and reads its sizes, operators and multiplications. Both toolchains
(our own, and that of Kneron, the vendor of the chips) check and report these facts.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import onnx
from onnx import helper, shape_inference

from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.toolchain import refusals

Shape = tuple[int, ...]
#: Bytes of the widest type of the standard, a complex number of two doubles.
_WIDEST_ELEMENT = 16


def fix_inputs(model: onnx.ModelProto) -> list[str]:
    """Set the first dimension of each input, the batch size, to 1 if it has no size. Returns a sentence for each input
    that changed. Raises Permanent if another dimension has no size.
    """
    changes = []
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in weights:  # old exporters list the weights among the inputs, too
            continue
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            raise refusals.missing_shapes(value.name, "has no shape; export the model with fixed shapes")
        for number, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.HasField("dim_value") and dimension.dim_value > 0:
                continue
            if number > 0:
                complaint = f"has no fixed size in dimension {number}; export the model with fixed shapes"
                raise refusals.missing_shapes(value.name, complaint)
            dimension.dim_value = 1
            changes.append(f"the batch of {value.name[:100]} is 1")
        for other in (*model.graph.value_info, *model.graph.output):
            if other.name == value.name:
                _fix_sides(other, shape_of(value))
    return changes


def _fix_sides(value: onnx.ValueInfoProto, shape: Shape) -> None:
    """Give each free dimension of `value` its size in `shape`. `value` lists an input of the graph a second time, and a
    tool may read either entry. This function does not change a size that contradicts the input's size, because a later
    check refuses such a model.
    """
    for dimension, size in zip(value.type.tensor_type.shape.dim, shape, strict=False):
        if dimension.dim_value <= 0:
            dimension.dim_value = size


def infer_shapes(model: onnx.ModelProto, limits: ModelLimits) -> onnx.ModelProto:
    """The model with the shapes of all tensors. Raises Permanent if shapes contradict each other or are too large."""
    try:
        with_shapes = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (shape_inference.InferenceError, RuntimeError, ValueError) as error:
        raise refusals.invalid_model(str(error)) from error
    total = 0
    for value in (*with_shapes.graph.input, *with_shapes.graph.value_info, *with_shapes.graph.output):
        size = _bytes_of(value)
        total += size
        if size > limits.max_tensor_bytes:
            raise refusals.tensor_too_large(value.name, size, limits.max_tensor_bytes)
    if total > limits.max_activation_bytes:
        raise refusals.activations_too_large(total, limits.max_activation_bytes)
    return with_shapes


def shape_of(value: onnx.ValueInfoProto) -> Shape:
    """The sizes of the dimensions. An unknown size counts as 0. A negative size counts as 0, too, because exporters
    write -1 for a free dimension, and a negative size would make a sum of sizes smaller.
    """
    return tuple(max(dimension.dim_value, 0) for dimension in value.type.tensor_type.shape.dim)


def bytes_of_element(data_type: int) -> int:
    """The bytes of one element of a TensorProto.DataType. An unknown type counts as the widest."""
    try:
        return int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    except KeyError:
        return _WIDEST_ELEMENT


def _bytes_of(value: onnx.ValueInfoProto) -> int:
    data_type = value.type.tensor_type.elem_type
    if data_type in {onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING}:
        return 0
    return math.prod(shape_of(value)) * bytes_of_element(data_type)


def specification(values: Any) -> list[dict[str, Any]]:
    """Inputs or outputs, as reports and manifests show them. The names are not shortened, because `references.samples`
    gives the model its inputs by these names.
    """
    return [
        {
            "name": value.name,
            "shape": list(shape_of(value)),
            "type": onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower(),
        }
        for value in values
    ]


def facts_of(model: onnx.ModelProto) -> dict[str, Any]:
    """Operators, parameters, multiply-accumulates (of convolutions and matrix products), inputs and outputs."""
    graph = model.graph
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    shapes = {v.name: shape_of(v) for v in (*graph.input, *graph.value_info, *graph.output)} | weights
    return {
        "opset": next(o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}),
        "nodes": len(graph.node),
        "operators": dict(Counter(node.op_type for node in graph.node).most_common()),
        "parameters": sum(math.prod(shape) for shape in weights.values()),
        "macs": sum(_macs(node, shapes) for node in graph.node),
        "inputs": specification(value for value in graph.input if value.name not in weights),
        "outputs": specification(graph.output),
    }


def _macs(node: onnx.NodeProto, shapes: dict[str, Shape]) -> int:
    """The multiply-accumulates of a node. Every operator except convolutions and matrix products counts as 0."""
    output_size = math.prod(shapes.get(node.output[0], (0,))) if node.output else 0
    left_shape, right_shape = (shapes.get(node.input[i], ()) if len(node.input) > i else () for i in (0, 1))
    if node.op_type == "Conv" and len(right_shape) > 1:
        return output_size * math.prod(right_shape[1:])
    if node.op_type == "MatMul" and left_shape:
        return output_size * left_shape[-1]
    if node.op_type == "Gemm" and left_shape:
        is_transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
        return output_size * left_shape[0 if is_transposed else -1]
    return 0
