"""Reads an untrusted ONNX file, and refuses a model that breaks a limit. Both toolchains use this module. One is our
own, made of open-source libraries. The other is that of the vendor Kneron.

Limits that are cheap to check come first. A model may not refer to another file, and may use only operators of the ONNX
standard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import defs

from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.shapes import bytes_of_element

# An opset is a version of the ONNX operators. The toolchains convert old opsets.
_OLDEST_OPSET = 1  # the oldest opset that is accepted
#: The domains of the ONNX standard: "ai.onnx" is another spelling of "".
_STANDARD = {"", "ai.onnx"}
_MAX_DEPTH = 16  # how deep graphs may be nested in graphs


def check_size(path: Path, limits: ModelLimits) -> None:
    """Refuse a file of any format if it is too large."""
    size = path.stat().st_size
    if size > limits.max_bytes:
        raise refusals.model_too_large(size, limits.max_bytes)


def load(path: Path, limits: ModelLimits) -> onnx.ModelProto:
    """Parse the model. Refuse a model that is too large, refers to another file, or uses non-standard operators.

    Raises Permanent with one of the codes of refusals.py.
    """
    check_size(path, limits)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise refusals.not_onnx("the file is damaged, truncated or of another kind") from error
    if not model.HasField("graph") or not model.graph.node or not model.opset_import:
        raise refusals.not_onnx("it has no graph, or names no opset")
    if any(not isinstance(imported.domain, str) for imported in model.opset_import):
        raise refusals.invalid_model("a domain in it is not UTF-8")
    _check_opset(model)
    _check_graphs(model, limits)
    if not any(imported.domain in _STANDARD for imported in model.opset_import):
        raise refusals.invalid_model("it names no opset of the standard")
    return model


def _check_opset(model: onnx.ModelProto) -> None:
    newest = defs.onnx_opset_version()
    for imported in model.opset_import:
        if imported.domain in _STANDARD and not _OLDEST_OPSET <= imported.version <= newest:
            raise refusals.unsupported_opset(imported.version, newest)


def _check_graphs(model: onnx.ModelProto, limits: ModelLimits) -> None:
    """Refuse too many nodes, tensors that are too large, and everything outside of the ONNX standard (the model's own
    functions, other operators, and sparse tensors). One refusal names everything outside of the standard.
    """
    nodes = 0
    unsupported = {f"{function.domain}.{function.name}" for function in model.functions}
    for graph in _checked_graphs(model.graph, limits):
        nodes += len(graph.node)
        if nodes > limits.max_nodes:
            raise refusals.too_many_nodes(limits.max_nodes)
        unsupported |= {
            f"{node.domain}.{node.op_type}"
            for node in graph.node
            if node.domain not in _STANDARD or not defs.has(node.op_type)
        }
        for tensor in graph.initializer:
            _check_tensor(tensor, limits)
        for sparse in graph.sparse_initializer:
            unsupported.add(f"sparse tensor {sparse.values.name}")
    if unsupported:
        raise refusals.unsupported_operators(sorted(unsupported))


def _checked_graphs(graph: onnx.GraphProto, limits: ModelLimits, depth: int = 0) -> Iterator[onnx.GraphProto]:
    """This graph and the graphs in the attributes of its nodes. Also checks the names in the graphs, and the tensors in
    the attributes.
    """
    if depth > _MAX_DEPTH:
        raise refusals.invalid_model(f"its graphs are nested deeper than {_MAX_DEPTH}")
    _check_names(graph)
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for tensor in (attribute.t, *attribute.tensors):
                _check_tensor(tensor, limits)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                _check_sparse_tensor(sparse, limits)
            if attribute.HasField("g"):
                yield from _checked_graphs(attribute.g, limits, depth + 1)
            for inner in attribute.graphs:
                yield from _checked_graphs(inner, limits, depth + 1)


def _check_names(graph: onnx.GraphProto) -> None:
    """Refuse names that are not UTF-8, because protobuf returns them as bytes, and other code expects text."""
    values = (*graph.input, *graph.output, *graph.value_info)
    names = [graph.name, *(value.name for value in values), *(tensor.name for tensor in graph.initializer)]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    if any(not isinstance(name, str) for name in names):
        raise refusals.invalid_model("a name in it is not UTF-8")


def _check_tensor(tensor: onnx.TensorProto, limits: ModelLimits) -> None:
    """Refuse a tensor that is too large, or whose data is outside of the model's file. Such data may be in another file
    or at an address in memory, and onnxruntime would read it from there.
    """
    if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
        raise refusals.external_data(tensor.name)
    _check_sides(tensor, tensor.dims, limits)


def _check_sparse_tensor(sparse: onnx.SparseTensorProto, limits: ModelLimits) -> None:
    """Check like `_check_tensor`, but with the size of the dense tensor, because the runtime makes the tensor dense."""
    _check_tensor(sparse.values, limits)
    _check_tensor(sparse.indices, limits)
    _check_sides(sparse.values, sparse.dims, limits)


def _check_sides(tensor: onnx.TensorProto, sides: Sequence[int], limits: ModelLimits) -> None:
    if any(side < 0 for side in sides):
        raise refusals.invalid_model(f"the tensor {tensor.name[:100]!r} has a negative side")
    size = math.prod(sides) * bytes_of_element(tensor.data_type)
    if size > limits.max_tensor_bytes:
        raise refusals.tensor_too_large(tensor.name, size, limits.max_tensor_bytes)
