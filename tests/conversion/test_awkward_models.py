"""Models that onnxruntime's quantiser refuses or breaks as they are: they are quantised, and answer as before."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from leasehold.domain.work import Work
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import open_toolchain
from leasehold.pipelines.conversion.toolchain.comparison import Comparison
from leasehold.pipelines.conversion.toolchain.running import random_tensors
from tests.conversion.conftest import PARAMS
from tests.conversion.models import model_of, saved

GOOD_DB = 20.0


def drawn(*shape: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def built(nodes: list[onnx.NodeProto], x: list[int], y: list[int], **constants: Any) -> onnx.ModelProto:
    return model_of(
        nodes,
        inputs=[helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        outputs=[helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        weights=[numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )


def gemm(bias: Any, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="gemm", **attributes)
    return built([node], [4, 8], [4, 6], w=drawn(8, 6), b=bias)


def transposed() -> onnx.ModelProto:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="gemm", transB=1, beta=2.0)
    return built([node], [4, 8], [4, 6], w=drawn(6, 8), b=drawn(1, 6))


def fused(bias: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """onnxslim makes a Gemm of these two nodes."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    return built(nodes, [4, 8], [4, 6], w=drawn(8, 6), b=bias)


def deconvolution() -> onnx.ModelProto:
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], group=2, kernel_shape=[2, 2], strides=[2, 2])
    return built([node], [1, 4, 5, 5], [1, 6, 10, 10], w=drawn(4, 3, 2, 2), b=drawn(6))


def clipped(low: float, high: float) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3]),
        helper.make_node("Clip", ["c", "low", "high"], ["y"]),
    ]
    return built(nodes, [1, 3, 8, 8], [1, 4, 6, 6], w=drawn(4, 3, 3, 3), low=np.float32(low), high=np.float32(high))


AWKWARD: dict[str, Callable[[], onnx.ModelProto]] = {
    "a bias of one row": lambda: gemm(drawn(1, 6)),
    "a bias for each row": lambda: gemm(drawn(4, 1)),
    "a bias for each value": lambda: gemm(drawn(4, 6)),
    "a bias of one value": lambda: gemm(drawn(1)),
    "a bias without dimensions": lambda: gemm(np.float32(0.5)),
    "a large bias with a small beta": lambda: gemm(drawn(6) * 10, beta=0.25),
    "an alpha": lambda: gemm(drawn(6), alpha=0.25),
    "a transposed matrix": transposed,
    "a fused bias of one row": lambda: fused(drawn(1, 6)),
    "a fused bias for each value": lambda: fused(drawn(4, 6)),
    "a matrix for each of several": lambda: built(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [2, 4, 8], [2, 4, 6], w=drawn(2, 8, 6)
    ),
    "a deconvolution of two groups": deconvolution,
    "a range above zero": lambda: clipped(1.0, 3.0),
    "a range below zero": lambda: clipped(-3.0, -1.0),
    "a range around zero": lambda: clipped(-1.0, 1.0),
}


def outputs_of(model: onnx.ModelProto, directory: Path) -> dict[str, Any]:
    """The figures of the int8 model's outputs, compared with the float model's."""
    (out := directory / "out").mkdir()
    (references := directory / "references").touch()  # none: the toolchain draws the samples
    params = ConversionParams(**PARAMS)
    made = open_toolchain.optimise(
        Work("conversion", "onnx", params, {"model": saved(model, directory / "model")}, out)
    )
    files = {name: file.path for name, file in made.files.items()} | {"references": references}
    made = open_toolchain.quantise(Work("conversion", "bie", params, files, out))
    report: dict[str, Any] = json.loads(made.files["output/bie-report.json"].path.read_bytes())
    outputs: dict[str, Any] = report["outputs"]
    return outputs


@pytest.mark.parametrize("name", AWKWARD)
def test_an_awkward_model_answers_as_before(name: str, tmp_path: Path) -> None:
    (figures,) = outputs_of(AWKWARD[name](), tmp_path).values()
    assert figures["snr_db"] > GOOD_DB


def test_a_process_that_has_quantised_a_model_logs_warnings_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The toolchain keeps out the advice that onnxruntime logs meanwhile, and nothing else."""
    with caplog.at_level(logging.WARNING):
        outputs_of(next(iter(AWKWARD.values()))(), tmp_path)
        assert [record.getMessage() for record in caplog.records if record.name == "root"] == []
        logging.getLogger("later").warning("still logged")
    assert [record.getMessage() for record in caplog.records if record.name == "later"] == ["still logged"]


@pytest.mark.parametrize(
    ("expected", "answer", "agrees"),
    [
        ([[0.9]], [[0.1]], False),
        ([[0.9]], [[0.89]], True),
        ([[0.0]], [[0.5]], False),
        ([[0.1, 0.9], [0.9, 0.1]], [[0.2, 0.8], [0.6, 0.4]], True),
        ([[0.1, 0.9], [0.9, 0.1]], [[0.2, 0.8], [0.4, 0.6]], False),
        (np.array([430]), np.array([0]), False),
        (np.array([430]), np.array([430]), True),
        (np.array([[True, False]]), np.array([[True, True]]), False),
    ],
)
def test_the_top_1_agreement_of_a_single_score_or_of_an_index_is_that_of_the_values(
    expected: Any, answer: Any, agrees: bool
) -> None:
    comparison = Comparison()
    comparison.add({"y": np.asarray(expected)}, {"y": np.asarray(answer)})
    assert comparison.figures()["y"]["top1_agreement"] == agrees


@pytest.mark.parametrize(("type_", "span"), [("uint8", (0, 255)), ("int8", (-128, 127)), ("int32", (0, 1))])
def test_a_picture_of_bytes_is_drawn_from_all_bytes_and_an_index_is_nearly_always_valid(
    type_: str, span: tuple[int, int]
) -> None:
    rng = np.random.default_rng(1)
    values = random_tensors([("x", type_, [1, 3, 40, 40])], rng)["x"]
    assert (values.min(), values.max()) == span
    flat = random_tensors([("x", type_, [1, 64])], rng)["x"]
    assert {0, 1} >= set(flat.flatten().tolist())
