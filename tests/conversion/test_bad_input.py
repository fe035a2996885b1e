"""Whatever is sent: a stable code, and the same child goes on with the next model."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from leasehold.domain.errors import ChildCrashed, Permanent
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.pipeline import Preprocessing
from leasehold.pipelines.conversion.toolchain.loading import load
from leasehold.pipelines.conversion.toolchain.references import samples
from leasehold.pipelines.conversion.toolchain.shapes import infer_shapes
from tests.conversion.conftest import Bench
from tests.conversion.models import archive, model_of, network, pictures, saved


def encoded(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString())


def relu(source: str = "x", target: str = "y") -> onnx.NodeProto:
    return helper.make_node("Relu", [source], [target])


def external(location: str) -> bytes:
    model = network()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    return encoded(model)


def sparse_constant(outside: str = "", sides: tuple[int, int] = (2, 8)) -> onnx.ModelProto:
    """Of a Constant that is a sparse tensor. `outside`: the part of it that lies in another file."""
    values = numpy_helper.from_array(np.ones(4, np.float32), "values")
    indices = numpy_helper.from_array(np.arange(4, dtype=np.int64), "indices")
    for tensor in (values, indices):
        if tensor.name == outside:
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="weights.bin")
    sparse = helper.make_sparse_tensor(values, indices, sides)
    nodes = [
        helper.make_node("Constant", [], ["dense"], sparse_value=sparse),
        helper.make_node("ReduceSum", ["dense"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    return model_of(nodes)


def shaped(sides: list[Any] | None) -> bytes:
    return encoded(model_of([relu()], inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, sides)]))


def of_opset(version: int) -> bytes:
    return encoded(model_of([relu()], opset=version))


def of_no_standard_opset() -> bytes:
    model = model_of([relu()])
    del model.opset_import[:]
    model.opset_import.add(domain="com.example", version=1)
    return encoded(model)


def cyclic() -> bytes:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), relu("a", "b"), relu("b", "y")]
    return encoded(model_of(nodes))


def foreign(operator: str, domain: str) -> bytes:
    return encoded(model_of([helper.make_node(operator, ["x"], ["y"], domain=domain)]))


def contradictory() -> bytes:
    weight = numpy_helper.from_array(np.zeros((7, 4), np.float32), "w")
    return encoded(model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], weights=[weight]))


def bomb() -> bytes:
    """A few bytes that ask for 4 TB when constants are folded."""
    shape = numpy_helper.from_array(np.array([1_000_000, 1_000_000], np.int64), "shape")
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["huge"]),
        helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    return encoded(model_of(nodes, weights=[shape]))


def nested() -> bytes:
    graph = helper.make_graph([relu()], "inner", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])])
    for _ in range(20):
        node = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph.__class__())
        graph = helper.make_graph([node], "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])])
    return encoded(model_of(list(graph.node)))


def damaged_after_its_pixels() -> bytes:
    """A PNG whose last chunk, a profile of colours, ends after its name."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    name = b"iCCP" + b"name\0"
    profile = struct.pack(">I", 5) + name + struct.pack(">I", zlib.crc32(name))
    png, end = stream.getvalue()[:-12], stream.getvalue()[-12:]
    return png + profile + end


def no_archive(path: Path) -> Path:
    path.write_bytes(b"no archive at all")
    return path


def a_folder(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        folder = tarfile.TarInfo("pictures")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    return path


MODELS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "not_onnx"),
    "no protobuf": (lambda: b"\x89PNG\r\n\x1a\n" * 50, "not_onnx"),
    "truncated": (lambda: encoded(network())[:-100], "not_onnx"),
    "cyclic": (cyclic, "invalid_model"),
    "shapes contradict": (contradictory, "invalid_model"),
    "nested too deep": (nested, "invalid_model"),
    "no shape": (lambda: shaped(None), "missing_shapes"),
    "free side": (lambda: shaped([1, "n"]), "missing_shapes"),
    "unknown operator": (lambda: foreign("Frobnicate", ""), "unsupported_operators"),
    "foreign domain": (lambda: foreign("Relu", "com.example"), "unsupported_operators"),
    "opset from the future": (lambda: of_opset(999), "unsupported_opset"),
    "opset too old": (lambda: of_opset(0), "unsupported_opset"),
    "no opset of the standard": (of_no_standard_opset, "invalid_model"),
    "external data": (lambda: external("weights.bin"), "external_data"),
    "external data climbing out": (lambda: external("../../etc/passwd"), "external_data"),
    "address in memory": (lambda: external("*/_ORT_MEM_ADDR_/*"), "external_data"),
    "sparse values outside": (lambda: encoded(sparse_constant("values")), "external_data"),
    "sparse indices outside": (lambda: encoded(sparse_constant("indices")), "external_data"),
    "memory bomb": (bomb, "tensor_too_large"),
}


@pytest.mark.parametrize("name", MODELS)
async def test_a_bad_model_gets_its_code(bench: Bench, name: str) -> None:
    make, code = MODELS[name]
    path = bench.directory() / "model"
    path.write_bytes(make())
    with pytest.raises(Permanent) as refused:
        await bench.run("onnx", {"model": path})
    assert refused.value.code == code
    assert refused.value.message.isprintable()
    await bench.run("onnx", {"model": saved(network(), path)})


@pytest.mark.parametrize(
    ("data_type", "width"),
    [
        (TensorProto.FLOAT, 4), (TensorProto.DOUBLE, 8), (TensorProto.INT64, 8), (TensorProto.UINT8, 1),
        (TensorProto.FLOAT16, 2), (TensorProto.COMPLEX128, 16), (99, 16),
    ],
)  # fmt: skip
def test_the_bytes_of_a_weight_follow_from_its_type(tmp_path: Path, data_type: int, width: int) -> None:
    """A type that nobody knows counts as the widest."""
    weight = TensorProto(name="w", data_type=data_type, dims=[10, 10])
    path = saved(model_of([relu()], weights=[weight]), tmp_path / "model")
    load(path, ModelLimits(max_tensor_bytes=100 * width))
    with pytest.raises(Permanent) as refused:
        load(path, ModelLimits(max_tensor_bytes=100 * width - 1))
    assert refused.value.code == "tensor_too_large"
    assert f"{100 * width} bytes; at most {100 * width - 1}" in refused.value.message


def test_a_sparse_constant_counts_as_the_dense_one_that_it_becomes(tmp_path: Path) -> None:
    path = saved(sparse_constant(sides=(10, 10)), tmp_path / "model")
    load(path, ModelLimits(max_tensor_bytes=400))
    with pytest.raises(Permanent) as refused:
        load(path, ModelLimits(max_tensor_bytes=399))
    assert refused.value.code == "tensor_too_large"


def test_a_sparse_constant_among_others_is_checked_as_well(tmp_path: Path) -> None:
    model = sparse_constant("values")
    (attribute,) = model.graph.node[0].attribute
    attribute.sparse_tensors.append(attribute.sparse_tensor)
    attribute.ClearField("sparse_tensor")
    with pytest.raises(Permanent) as refused:
        load(saved(model, tmp_path / "model"), ModelLimits())
    assert refused.value.code == "external_data"


@pytest.mark.parametrize("sides", [[-(1 << 50)], [1 << 50, -(1 << 10)], [-(1 << 25), -(1 << 25)]])
def test_a_negative_size_leaves_no_more_room_for_other_tensors(sides: list[int]) -> None:
    """The limit of all tensors together holds, whatever the file says of a tensor that no node uses."""
    model = model_of([relu()])
    model.graph.value_info.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, sides))
    infer_shapes(model, ModelLimits(max_activation_bytes=32))
    with pytest.raises(Permanent) as refused:
        infer_shapes(model, ModelLimits(max_activation_bytes=31))
    assert refused.value.code == "activations_too_large"
    assert "have 32 bytes" in refused.value.message


@pytest.mark.parametrize("head", [b"", b"\x1c\0\0\0TFL3"], ids=["onnx", "tflite"])
async def test_a_file_of_2_gb_is_refused_before_it_is_read(bench: Bench, head: bytes) -> None:
    path = bench.directory() / "model"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(2 * 1024**3)
    with pytest.raises(Permanent) as refused:
        await bench.run("onnx", {"model": path})
    assert refused.value.code == "model_too_large"


async def test_a_model_that_the_step_before_made_too_large_is_refused(bench: Bench) -> None:
    directory = bench.directory()
    (references := directory / "references").touch()
    files = {"output/out.onnx": saved(network(), directory / "model"), "references": references}
    with pytest.raises(Permanent) as refused:
        await bench.run("bie", files, limits={"max_bytes": 10})
    assert refused.value.code == "model_too_large"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: archive(path, [b"MZ no picture"]), "file 1"),
        (lambda path: archive(path, [b"\0" * 10_000_001]), "file 1 is larger than 10000000 bytes"),
        (lambda path: archive(path, [b"GIF89a" + b"\0" * 40]), "file 1"),
        (lambda path: archive(path, [damaged_after_its_pixels()]), "file 1 is not a readable"),
        (lambda path: pictures(path, 101, side=2), "there are more than 100 images"),
        (a_folder, "entry 1 of the archive is not a file"),
        (no_archive, "the archive is damaged"),
    ],
    ids=["no picture", "too large", "another kind", "damaged after its pixels", "too many", "a folder", "no archive"],
)
async def test_bad_reference_images_get_their_code(bench: Bench, make: Callable[[Path], Path], message: str) -> None:
    directory = bench.directory()
    model = await bench.run("onnx", {"model": saved(network(), directory / "model")})
    files = {"output/out.onnx": model.files["output/out.onnx"].path, "references": make(directory / "references")}
    with pytest.raises(Permanent) as refused:
        await bench.run("bie", files)
    assert refused.value.code == "bad_reference_images"
    assert message in refused.value.message


def test_a_lack_of_memory_is_not_called_a_fault_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lack_memory(*_: Any) -> None:
        raise OSError("out of memory when reading image file")  # in Pillow's own words

    monkeypatch.setattr(Image.Image, "convert", lack_memory)
    inputs = [{"name": "x", "type": "float", "shape": [1, 3, 8, 8]}]
    with pytest.raises(MemoryError):
        samples(pictures(tmp_path / "references", 1), inputs, Preprocessing(), ModelLimits(), 0)


async def test_pictures_for_a_model_that_takes_none_are_refused(bench: Bench) -> None:
    directory = bench.directory()
    model = await bench.run("onnx", {"model": saved(model_of([relu()]), directory / "model")})
    images = pictures(directory / "references", 1)
    files = {"output/out.onnx": model.files["output/out.onnx"].path, "references": images}
    with pytest.raises(Permanent) as refused:
        await bench.run("bie", files)
    assert refused.value.code == "bad_reference_images"


async def test_a_model_that_eats_memory_ends_its_child_and_not_the_worker(bench: Bench) -> None:
    """Its tensors are within the limits that a job allows it, yet beyond what the child may have."""
    directory = bench.directory()
    side = 60_000
    ones = numpy_helper.from_array(np.array([side, side], np.int64), "shape")
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["huge"]),
        helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    path = saved(model_of(nodes, weights=[ones]), directory / "model")
    with pytest.raises(ChildCrashed) as ended:
        await bench.run("onnx", {"model": path}, limits={"max_tensor_bytes": 10**12, "max_activation_bytes": 10**13})
    assert ended.value.code in {"out_of_memory", "child_crashed"}
    done = await bench.run("onnx", {"model": saved(network(), directory / "model")})
    assert "output/out.onnx" in done.files
