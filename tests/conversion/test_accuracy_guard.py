"""`accuracy_guard`: layers stay float where the int8 model would lose more than a point of top-1 agreement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, shape_inference

from leasehold.domain.work import Work
from leasehold.pipelines.conversion import nef
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import open_toolchain
from leasehold.pipelines.conversion.toolchain.accuracy_guard import GOAL, MAX_FLOAT_LAYERS, Guarded, guard
from leasehold.pipelines.conversion.toolchain.layer_sensitivity import NoisyLayer
from leasehold.pipelines.conversion.toolchain.running import Runnable
from tests.conversion.conftest import PARAMS, Bench
from tests.conversion.models import network, pictures, saved


def fragile() -> onnx.ModelProto:
    """A network of which int8 breaks the second convolution alone: one of its inputs is always 0 (a Relu of -1000), and
    has weights so large that all others are below half a step. All outputs of the convolution are 0 then.
    """
    model = network()
    weights = {one.name: one for one in model.graph.initializer}
    for name, place, value in (("b1", np.s_[7], -1000), ("w2", np.s_[:, 7], 500)):
        changed = numpy_helper.to_array(weights[name]).copy()
        changed[place] = value
        weights[name].CopyFrom(numpy_helper.from_array(changed, name))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    return model


def report_of(made: dict[str, Path]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(made["output/report.json"].read_bytes())["bie"]
    return read


async def test_the_layers_that_cost_the_answers_stay_float_and_the_report_says_which_and_why(bench: Bench) -> None:
    directory = bench.directory()
    model, images = saved(fragile(), directory / "model"), pictures(directory / "references", 8)
    plain = report_of(await bench.convert(model, images))
    assert plain["outputs"]["y"]["top1_agreement"] < GOAL
    assert "accuracy_guard" not in plain

    made = await bench.convert(model, images, accuracy_guard=True)
    said = report_of(made)
    guarded = said["accuracy_guard"]
    assert (guarded["reached"], guarded["goal"]) == (True, GOAL)
    assert guarded["agreement_before"] == plain["outputs"]["y"]["top1_agreement"]
    assert guarded["agreement"] == said["outputs"]["y"]["top1_agreement"] == 1
    assert [layer["operator"] for layer in guarded["float_layers"]] == ["Conv"]
    assert guarded["float_layers"][0] == said["worst_layers"][0] == plain["worst_layers"][0]
    assert guarded["float_layers"][0]["added"] > 0.5
    quantised = onnx.load(made["output/out.bie"])
    kept = {one.name: one for one in quantised.graph.initializer if one.data_type == TensorProto.FLOAT}
    assert any(numpy_helper.to_array(one).shape == (16, 8, 3, 3) for one in kept.values())
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in quantised.graph.node}, "the rest is int8"


async def test_a_layer_that_stays_float_is_float_where_the_package_runs(bench: Bench) -> None:
    """onnxruntime quantises the weights of a convolution between two int8 layers when it loads a model."""
    directory = bench.directory()
    model, images = saved(fragile(), directory / "model"), pictures(directory / "references", 8)
    made = await bench.convert(model, images, accuracy_guard=True)
    packed = Runnable(nef.read(made["output/out.nef"]).part("model.onnx"))
    reference = Runnable(made["output/out.onnx"])
    for seed in range(3):
        given = {name: abs(values) / 4 for name, values in packed.random_input(np.random.default_rng(seed)).items()}
        answer, expected = packed.run(given)["y"], reference.run(given)["y"]
        assert np.argmax(answer) == np.argmax(expected)
        assert np.linalg.norm(answer - expected) < 0.1 * np.linalg.norm(expected)


def fragile_at_the_end() -> onnx.ModelProto:
    """A network of which int8 breaks the dense layer alone: one of its inputs is always 0 (a Relu of what is never
    positive), and has weights so large that all others are below half a step.
    """
    model = network()
    weights = {one.name: one for one in model.graph.initializer}
    w2, w3 = (numpy_helper.to_array(weights[name]).copy() for name in ("w2", "w3"))
    w2[0], w3[0] = -np.abs(w2[0]), 500
    weights["w2"].CopyFrom(numpy_helper.from_array(w2, "w2"))
    weights["w3"].CopyFrom(numpy_helper.from_array(w3, "w3"))
    return model


async def test_what_a_relu_cuts_off_is_no_noise_of_the_layer_before_it(bench: Bench) -> None:
    """In the int8 graph the Relu is a part of the quantisation of the convolution's output."""
    directory = bench.directory()
    model, images = saved(fragile_at_the_end(), directory / "model"), pictures(directory / "references", 8)
    layers = report_of(await bench.convert(model, images, enable_evaluate=True))["worst_layers"]
    assert [layer["operator"] for layer in layers] == ["MatMul", "Conv", "Conv"]
    assert layers[0]["added"] > 0.1
    assert max(layer["noise"] for layer in layers[1:]) < 0.01
    guarded = report_of(await bench.convert(model, images, accuracy_guard=True))["accuracy_guard"]
    assert [layer["operator"] for layer in guarded["float_layers"]] == ["MatMul"]
    assert guarded["reached"]


async def test_a_node_without_a_name_can_stay_float(bench: Bench) -> None:
    model, directory = fragile(), bench.directory()
    assert not any(node.name for node in model.graph.node)
    earlier = directory / "report"
    earlier.write_text("{}")
    done = await bench.run(
        "bie",
        {
            "output/out.onnx": saved(shape_inference.infer_shapes(model), directory / "model"),
            "output/onnx-report.json": earlier,
            "references": pictures(directory / "references", 8),
        },
        accuracy_guard=True,
    )
    assert done.value is not None
    summary = done.value["accuracy_guard"]
    assert (summary["reached"], summary["agreement"], summary["float_layers"]) == (True, 1.0, 1)


def test_the_progress_of_the_guards_rounds_never_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[float, str]] = []
    monkeypatch.setattr(open_toolchain, "report_progress", lambda _work, *report: heard.append(report))
    (out := tmp_path / "out").mkdir()
    params = ConversionParams(**PARAMS, accuracy_guard=True)
    model = {"model": saved(fragile(), tmp_path / "model")}
    made = open_toolchain.optimise(Work("conversion", "onnx", params, model, out))
    files = {name: file.path for name, file in made.files.items()}
    heard.clear()
    files["references"] = pictures(tmp_path / "references", 8)
    open_toolchain.quantise(Work("conversion", "bie", params, files, out))
    percents = [percent for percent, _ in heard]
    assert percents == sorted(percents)
    assert heard[-1] == (86.0, "comparing on 8 of 8, with 1 layer in float")


async def test_a_model_that_keeps_its_answers_is_the_same_with_the_guard(bench: Bench) -> None:
    directory = bench.directory()
    model, images = saved(network(), directory / "model"), pictures(directory / "references", 8)
    plain, guarded = await bench.convert(model, images), await bench.convert(model, images, accuracy_guard=True)
    assert guarded["output/out.bie"].read_bytes() == plain["output/out.bie"].read_bytes()
    assert report_of(guarded)["accuracy_guard"] == {
        "goal": GOAL, "reached": True, "agreement_before": 1, "agreement": 1, "float_layers": [],
    }  # fmt: skip


def layers(*names: str, added: float = 1.0) -> list[NoisyLayer]:
    return [NoisyLayer(name, "Conv", 1.0, added) for name in names]


class Model:
    """A model of layers with these names, the noisiest first. It agrees once `enough` of them are in float."""

    def __init__(self, names: Sequence[str], enough: int = 1000) -> None:
        self.names = list(names)
        self.enough = enough
        self.rounds: list[list[str]] = []

    def find_layers(self) -> list[NoisyLayer]:
        return layers(*self.names)

    def quantise_again(self, float_layers: Sequence[NoisyLayer]) -> float:
        self.rounds.append([layer.name for layer in float_layers])
        return GOAL if len(float_layers) >= self.enough else GOAL - 0.01

    def guard(self, agreement: float = 0.5) -> Guarded:
        return guard(agreement, self.find_layers, self.quantise_again)


def test_each_round_keeps_twice_as_many_layers_in_float_until_the_goal_is_reached() -> None:
    model = Model("abcdefghijkl", enough=5)
    guarded = model.guard()
    assert model.rounds == [["a"], ["a", "b"], ["a", "b", "c", "d"], list("abcdefgh")]
    assert (guarded.before, guarded.after, len(guarded.float_layers)) == (0.5, GOAL, 8)
    assert guarded.summary()["reached"] is True


def test_a_layer_whose_noise_another_one_hid_is_found_in_the_next_round() -> None:
    model = Model("ab", enough=3)
    found = iter([layers("a") + layers("hidden", added=-1.0), layers("hidden", "a"), layers("b")])
    guarded = guard(0.5, lambda: next(found), model.quantise_again)
    assert model.rounds == [["a"], ["a", "hidden"], ["a", "hidden", "b"]]
    assert guarded.summary()["reached"] is True


def test_no_more_layers_become_float_than_the_bound_also_after_a_round_that_found_few() -> None:
    names = [str(number) for number in range(200)]
    model = Model(names)
    found = iter([names] * 6 + [names[:42]] + [names] * 3)
    guard(0.5, lambda: layers(*next(found)), model.quantise_again)
    assert [len(one) for one in model.rounds] == [1, 2, 4, 8, 16, 32, 42, MAX_FLOAT_LAYERS]


def test_a_round_that_makes_the_model_worse_is_undone() -> None:
    model = Model("abcdefgh")
    agreements = iter([0.9, 0.95, 0.7, 0.6, 0.95])
    made: list[list[str]] = []

    def quantise_again(float_layers: Sequence[NoisyLayer]) -> float:
        made.append([layer.name for layer in float_layers])
        return next(agreements)

    guarded = guard(0.5, model.find_layers, quantise_again)
    assert made == [["a"], ["a", "b"], ["a", "b", "c", "d"], list("abcdefgh"), ["a", "b"]]
    assert (guarded.after, len(guarded.float_layers)) == (0.95, 2)


def test_if_every_round_makes_the_model_worse_it_is_int8_as_a_whole() -> None:
    agreements = iter([0.4, 0.3, 0.94])
    guarded = guard(0.94, Model("ab").find_layers, lambda _layers: next(agreements))
    assert (guarded.before, guarded.after, guarded.float_layers) == (0.94, 0.94, [])


def test_a_layer_without_weights_cannot_stay_float() -> None:
    """onnxruntime runs it in int8 between int8 layers."""
    model = Model("ab")
    without = [replace(layer, has_weights=False) for layer in layers("added")]
    guard(0.5, lambda: [*without, *layers("a", "b")], model.quantise_again)
    assert model.rounds == [["a"], ["a", "b"]]


def test_at_the_goal_nothing_is_done_again() -> None:
    def no_layers() -> list[NoisyLayer]:
        raise AssertionError("nobody looks for layers: that costs two runs of each model")

    model = Model("abc")
    assert guard(GOAL, no_layers, model.quantise_again) == Guarded(GOAL, GOAL, [])
    assert model.rounds == []


@pytest.mark.parametrize(
    ("names", "counts"),
    [("abc", [1, 2, 3]), ("", []), ([str(n) for n in range(100)], [1, 2, 4, 8, 16, 32, MAX_FLOAT_LAYERS])],
)
def test_a_goal_that_no_layer_can_reach_ends_with_what_was_tried(names: Sequence[str], counts: list[int]) -> None:
    model = Model(names)
    guarded = model.guard()
    assert [len(one) for one in model.rounds] == counts
    assert guarded.summary()["reached"] is False
    assert guarded.summary()["float_layers"] == len(guarded.report()["float_layers"]) == (counts or [0])[-1]


def test_a_worker_of_an_earlier_release_gets_no_parameter_that_it_does_not_know() -> None:
    assert "accuracy_guard" not in ConversionParams(**PARAMS).model_dump(mode="json")
    assert "accuracy_guard" not in ConversionParams(**PARAMS).model_dump_json()
    asked = ConversionParams(**PARAMS, accuracy_guard=True)
    assert ConversionParams.model_validate(asked.model_dump(mode="json")) == asked
