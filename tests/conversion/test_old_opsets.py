"""Models of opset 6 and older are lifted, and answer what ONNX itself expects of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper, numpy_helper

from leasehold.domain.errors import Permanent
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from leasehold.pipelines.conversion import steps
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import open_toolchain, optimise
from tests.conversion.conftest import PARAMS, Bench
from tests.conversion.models import model_of, saved

CASES = Path(onnx.__file__).parent / "backend/test/data"
#: One of each kind of change that came after opset 6: broadcasts, attributes that became inputs, statistics, pads.
OLD = (
    "pytorch-converted/test_BatchNorm2d_eval", "pytorch-converted/test_Conv2d_padding",
    "pytorch-converted/test_LeakyReLU", "pytorch-converted/test_MaxPool2d", "pytorch-converted/test_Softmax",
    "pytorch-operator/test_operator_add_size1_broadcast", "pytorch-operator/test_operator_addmm",
    "pytorch-operator/test_operator_clip", "pytorch-operator/test_operator_concat2",
    "pytorch-operator/test_operator_pad", "pytorch-operator/test_operator_reduced_sum",
)  # fmt: skip


def _tensor(path: Path) -> np.ndarray[Any, Any]:
    return numpy_helper.to_array(onnx.load_tensor(str(path)))


@pytest.mark.parametrize("name", OLD)
def test_a_model_of_opset_6_answers_what_onnx_expects(name: str, tmp_path: Path) -> None:
    case = CASES / name
    original = onnx.load(case / "model.onnx")
    assert original.opset_import[0].version == 6
    params = ConversionParams.model_validate(PARAMS)
    done = steps.optimise_model(Work("conversion", "onnx", params, {"model": case / "model.onnx"}, tmp_path))
    assert "opset 6 was lifted to 7" in _report(done)["changes"]
    assert _report(done)["original"]["opset"] == 6
    weights = {tensor.name for tensor in original.graph.initializer}
    names = [value.name for value in original.graph.input if value.name not in weights]
    data = case / "test_data_set_0"
    given = {name: _tensor(data / f"input_{number}.pb") for number, name in enumerate(names)}
    session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"), providers=["CPUExecutionProvider"])
    for number, answer in enumerate(session.run(None, given)):
        np.testing.assert_allclose(answer, _tensor(data / f"output_{number}.pb"), rtol=1e-3, atol=1e-4)


def _report(done: Done) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(done.files["output/onnx-report.json"].path.read_bytes())
    return said


async def test_what_the_converter_cannot_lift_ends_with_a_code(bench: Bench) -> None:
    """Until opset 6 PRelu's slope was spread along another axis, which the converter leaves as it is."""
    directory = bench.directory()
    with pytest.raises(Permanent) as refused:
        await bench.run("onnx", {"model": CASES / "pytorch-converted/test_PReLU_2d_multiparam/model.onnx"}, directory)
    assert refused.value.code == "not_runnable"


def _too_large_to_write(_work: Work) -> Done:
    """What protobuf raises for more than 2 GB: in inference, in the converter, where a model is saved."""
    raise EncodeError("Failed to serialize proto")


def test_a_model_that_cannot_be_written_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(open_toolchain, "optimise", _too_large_to_write)
    (model := tmp_path / "model").touch()
    with pytest.raises(Permanent) as refused:
        steps.optimise_model(
            Work("conversion", "onnx", ConversionParams.model_validate(PARAMS), {"model": model}, tmp_path)
        )
    assert refused.value.code == "not_serialisable"


@pytest.mark.parametrize("name", [b"Relu", b"input"])
async def test_a_name_that_is_not_utf_8_makes_a_model_invalid(bench: Bench, name: bytes) -> None:
    side = [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 4])]
    path = saved(model_of([helper.make_node("Relu", ["input"], ["y"])], inputs=side), bench.directory() / "model")
    path.write_bytes(path.read_bytes().replace(name, b"\xff" * len(name)))
    with pytest.raises(Permanent) as refused:
        await bench.run("onnx", {"model": path})
    assert refused.value.code in {"invalid_model", "unsupported_operators"}


def test_what_the_simplifier_makes_too_large_to_write_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxslim.slim", lambda _model: _Grown())
    model = model_of([helper.make_node("Relu", ["x"], ["y"])])
    assert optimise.simplify(model) is model


class _Grown:
    """A model of more than 2 GB, as far as it is asked."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        raise EncodeError("Failed to serialize proto")
