from __future__ import annotations

import io
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson
import pytest
from onnx import TensorProto, helper, numpy_helper, version_converter
from PIL import Image

from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.work import Work
from leasehold.pipelines.conversion import nef
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.pipeline import ConversionParams, Preprocessing
from leasehold.pipelines.conversion.toolchain import (
    open_toolchain,
    optimise,
    references,
    refusals,
    running,
    tflite,
)
from leasehold.pipelines.conversion.toolchain.comparison import LARGEST_FLOAT, Comparison, Description
from leasehold.pipelines.conversion.toolchain.layer_sensitivity import _noise
from leasehold.pipelines.conversion.toolchain.optimise import largest_difference, trial_answers
from leasehold.pipelines.conversion.toolchain.references import samples
from leasehold.pipelines.conversion.toolchain.running import Runnable
from tests.conversion.conftest import PARAMS, Bench
from tests.conversion.models import archive, model_of, network, pictures, saved


def compare(reference: list[running.Tensors], answers: list[running.Tensors]) -> dict[str, dict[str, float]]:
    comparison = Comparison()
    for expected, answer in zip(reference, answers, strict=True):
        comparison.add(expected, answer)
    return comparison.figures()


def describe(answers: list[running.Tensors]) -> dict[str, dict[str, float | None]]:
    description = Description()
    for answer in answers:
        description.add(answer)
    return description.figures()


def report(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_bytes())
    return read


async def test_a_model_goes_through_all_three_steps_inside_the_sandbox(bench: Bench) -> None:
    directory = bench.directory()
    model, images = saved(network(opset=13), directory / "model"), pictures(directory / "references", 8)
    made = await bench.convert(model, images, enable_evaluate=True, enable_sim_fp=True, enable_sim_fixed=True)
    container = nef.read(made["output/out.nef"])
    assert container.manifest["toolchain"] == "open"
    assert (container.manifest["platform"], container.manifest["model_id"]) == ("720", 40000)
    assert {"onnx", "onnxruntime", "onnxslim"} <= container.manifest["versions"].keys()
    packed, quantised = Runnable(container.part("model.onnx")), Runnable(made["output/out.bie"])
    given = packed.random_input(np.random.default_rng(3))
    assert np.allclose(packed.run(given)["y"], quantised.run(given)["y"], atol=0.05)
    whole = report(made["output/report.json"])
    assert container.part("report.json") == made["output/report.json"].read_bytes()
    assert {"sim_fp", "sim_fixed", "worst_layers"} <= whole["bie"].keys()
    layers = whole["bie"]["worst_layers"]
    assert {"Conv", "MatMul"} >= {layer["operator"] for layer in layers[:1]}
    assert [layer["added"] for layer in layers] == sorted((layer["added"] for layer in layers), reverse=True)
    assert 0 < max(layer["noise"] for layer in layers) < 0.01


async def test_the_report_says_what_was_changed_and_that_the_model_still_answers_the_same(bench: Bench) -> None:
    directory = bench.directory()
    done = await bench.run("onnx", {"model": saved(network(opset=13), directory / "model")})
    said = report(done.files["output/onnx-report.json"].path)
    assert (said["original"]["opset"], said["optimised"]["opset"]) == (13, 17)
    assert said["operators_changed"]["Identity"] == -1
    assert said["changes"] == ["the batch of x is 1"]
    assert said["equivalence"]["largest_relative_difference"] < 1e-3
    # by hand: 8*3*9 weights at 16*16 places, 16*8*9 at 7*7, 16 by 5
    assert said["original"]["macs"] == 216 * 256 + 1152 * 49 + 80
    assert said["original"]["parameters"] == 216 + 8 + 1152 + 80


async def test_the_int8_model_is_smaller_and_agrees_with_the_float_one(bench: Bench) -> None:
    directory = bench.directory()
    model = saved(network(), directory / "model")
    made = await bench.convert(model, pictures(directory / "references", 20))
    said = report(made["output/bie-report.json"])
    assert said["calibration"] == {"data": "reference images", "samples": 20}
    assert said["outputs"]["y"]["top1_agreement"] >= 0.95
    assert said["outputs"]["y"]["cosine"] > 0.99
    assert {"sim_fp", "sim_fixed", "worst_layers"}.isdisjoint(said), "nobody asked"
    operators = {node.op_type for node in onnx.load(made["output/out.bie"]).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators


async def test_the_int8_model_answers_the_same_on_every_processor(bench: Bench) -> None:
    """Two products of 8 and 7 bits fit into the 16 in which older processors add them. Of the exact answers one is what
    onnxruntime's kernels make, the other what the graph says.
    """
    directory = bench.directory()
    made = await bench.convert(saved(network(), directory / "model"), pictures(directory / "references", 8))
    weights = [
        numpy_helper.to_array(one)
        for one in onnx.load(made["output/out.bie"]).graph.initializer
        if one.data_type == onnx.TensorProto.INT8 and len(one.dims) > 1
    ]
    assert weights
    assert max(int(np.abs(one.astype(int)).max()) for one in weights) <= 64
    fast, exact = (Runnable(made["output/out.bie"], optimised=optimised) for optimised in (True, False))
    given = fast.random_input(np.random.default_rng(3))
    assert np.allclose(fast.run(given)["y"], exact.run(given)["y"], atol=0.05)


async def test_without_images_the_report_says_that_the_data_was_generated(bench: Bench) -> None:
    directory = bench.directory()
    (directory / "references").touch()
    made = await bench.convert(saved(network(), directory / "model"), directory / "references")
    assert report(made["output/bie-report.json"])["calibration"]["data"] == "generated"


@pytest.mark.parametrize("count", [0, 2], ids=["generated", "pictures"])
async def test_an_input_of_any_name_gets_the_samples(bench: Bench, count: int) -> None:
    directory, name = bench.directory(), "x" * 201
    model = network()
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    made = await bench.convert(saved(model, directory / "model"), pictures(directory / "references", count))
    assert [value["name"] for value in report(made["output/report.json"])["nef"]["inputs"]] == [name]


@pytest.mark.parametrize("opset", [6, 17], ids=["an old opset", "a new opset"])
async def test_a_model_that_lists_its_input_again_with_a_free_batch_is_converted(bench: Bench, opset: int) -> None:
    """Among the shapes that an exporter adds: every tool then believes another of the two."""
    directory = bench.directory()
    model = network(opset=opset)
    model.graph.value_info.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16]))
    (references := directory / "references").touch()
    made = await bench.convert(saved(model, directory / "model"), references)
    assert nef.read(made["output/out.nef"]).manifest["inputs"][0]["shape"] == [1, 3, 16, 16]


async def test_a_model_of_an_old_opset_whose_input_is_an_output_as_well_gets_a_code(bench: Bench) -> None:
    """Its batch is free at both places."""
    directory = bench.directory()
    model = network(opset=6)
    model.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16]))
    (references := directory / "references").touch()
    with pytest.raises(Permanent) as refused:
        await bench.convert(saved(model, directory / "model"), references)
    assert refused.value.code == "not_quantisable"


@pytest.mark.parametrize("sides", [[1, 7], [1, 4, 1]], ids=["another size", "another number of sides"])
async def test_a_model_that_lists_its_input_again_with_other_sides_is_invalid(bench: Bench, sides: list[int]) -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])])
    model.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, sides))
    with pytest.raises(Permanent) as refused:
        await bench.run("onnx", {"model": saved(model, bench.directory() / "model")})
    assert refused.value.code == "invalid_model"


async def test_the_same_model_gives_the_same_bytes(bench: Bench) -> None:
    directory = bench.directory()
    (directory / "references").touch()
    model = saved(network(), directory / "model")
    first = await bench.convert(model, directory / "references")
    second = await bench.convert(model, directory / "references")
    assert first["output/out.nef"] != second["output/out.nef"]
    assert first["output/out.nef"].read_bytes() == second["output/out.nef"].read_bytes()


async def test_a_step_says_how_far_it_is(bench: Bench) -> None:
    directory = bench.directory()
    await bench.run("onnx", {"model": saved(network(), directory / "model")})
    percents = [percent for percent, _ in bench.heard]
    assert percents
    assert percents == sorted(percents)


def test_a_damaged_container_is_refused(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"weights")
    nef.write(tmp_path / "whole", {"toolchain": "open"}, {"model.onnx": part})
    whole = (tmp_path / "whole").read_bytes()
    for name, data in {
        "magic": b"X" + whole[1:],
        "short": whole[:20],
        "cut": whole[:-1],
        "manifest": whole.replace(b"open", b"oven"),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(nef.BadContainer):
            nef.read(tmp_path / name)
    (tmp_path / "part").write_bytes(whole.replace(b"weights", b"weighty"))
    with pytest.raises(nef.BadContainer):
        nef.read(tmp_path / "part").part("model.onnx")


def _adds(value: float, path: Path) -> Path:
    constant = numpy_helper.from_array(np.full((1, 4), value, np.float32), "c")
    return saved(model_of([helper.make_node("Add", ["x", "c"], ["y"])], weights=[constant]), path)


@pytest.mark.parametrize("other", [-np.inf, np.nan, 1.0])
def test_an_answer_that_became_another_infinity_is_a_difference(tmp_path: Path, other: float) -> None:
    trials = trial_answers(_adds(np.inf, tmp_path / "first"), seed=1)
    assert largest_difference(trials, _adds(np.inf, tmp_path / "same")) == 0
    with pytest.raises(Permanent, match="differ"):
        largest_difference(trials, _adds(other, tmp_path / "other"))
    not_a_number = trial_answers(_adds(np.nan, tmp_path / "nan"), seed=1)
    assert largest_difference(not_a_number, _adds(np.nan, tmp_path / "also")) == 0


def float_values(name: str, sides: list[Any], kind: int = onnx.TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, sides)


def odd_output(node: onnx.NodeProto, kind: int, sides: list[Any], weights: Any = ()) -> onnx.ModelProto:
    """A model of a matrix product, with a second output `odd`."""
    product = numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), "w")
    return model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), node],
        outputs=[float_values("y", [1, 4]), float_values("odd", sides, kind)],
        weights=[product, *weights],
    )


NEVER = numpy_helper.from_array(np.zeros(4, np.bool_), "never")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(odd_output(helper.make_node("Log", ["y"], ["odd"]), onnx.TensorProto.FLOAT, [1, 4]), id="NaN"),
        pytest.param(
            odd_output(helper.make_node("NonZero", ["y"], ["odd"]), onnx.TensorProto.INT64, [2, "n"]), id="as many as"
        ),
        pytest.param(
            odd_output(
                helper.make_node("Compress", ["y", "never"], ["odd"], axis=1), onnx.TensorProto.FLOAT, [1, "n"], [NEVER]
            ),
            id="empty",
        ),
    ],
)
async def test_a_model_with_an_odd_output_is_converted_and_its_report_is_json(
    bench: Bench, model: onnx.ModelProto
) -> None:
    directory = bench.directory()
    nothing = directory / "references"
    nothing.touch()
    options = {"enable_evaluate": True, "enable_sim_fp": True, "enable_sim_fixed": True}
    made = await bench.convert(saved(model, directory / "model"), nothing, **options)
    outputs = report(made["output/report.json"])["bie"]["outputs"]
    assert outputs["y"]["snr_db"] > 10
    assert outputs["odd"].keys() == outputs["y"].keys()


async def test_a_model_with_an_output_of_text_is_refused(bench: Bench) -> None:
    text = helper.make_node("Cast", ["y"], ["odd"], to=onnx.TensorProto.STRING)
    model = saved(odd_output(text, onnx.TensorProto.STRING, [1, 4]), bench.directory() / "model")
    with pytest.raises(Permanent, match="the output 'odd' is not a tensor of numbers") as refused:
        await bench.run("onnx", {"model": model})
    assert refused.value.code == "not_runnable"


async def test_a_model_with_too_many_values_for_the_packages_manifest_is_refused(bench: Bench) -> None:
    names = [f"{number:04}{'o' * 196}" for number in range(4500)]
    nodes = [helper.make_node("Relu", ["x"], ["y"]), *(helper.make_node("Neg", ["y"], [name]) for name in names)]
    model = model_of(nodes, outputs=[float_values(name, [1, 4]) for name in names])
    directory = bench.directory()
    report_file = directory / "report"
    report_file.write_text('{"onnx": {}}')
    files = {"output/out.bie": saved(model, directory / "bie"), "output/bie-report.json": report_file}
    with pytest.raises(Permanent, match="manifest") as refused:
        await bench.run("nef", files)
    assert refused.value.code == "not_packageable"


def test_an_answer_that_is_infinite_in_int8_is_as_far_away_as_can_be() -> None:
    reference, answer = {"y": np.array([[1.0, 2.0]])}, {"y": np.array([[np.inf, 2.0]])}
    compared = compare([reference], [answer])["y"]
    assert compared == {"snr_db": -200.0, "cosine": 0.0, "max_error": LARGEST_FLOAT, "top1_agreement": 0.0}
    assert compare([answer], [answer])["y"] == {
        "snr_db": 200.0, "cosine": 1.0, "max_error": 0.0, "top1_agreement": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_layer_that_is_not_finite_in_int8_is_the_worst_one(bad: float) -> None:
    reference = np.array([[1.0, 2.0]])
    assert _noise(reference, np.array([[bad, 2.0]])) == LARGEST_FLOAT
    assert _noise(reference, np.array([[1.0]])) == LARGEST_FLOAT
    assert _noise(np.array([[bad, 2.0]]), np.array([[bad, 2.0]])) == 0.0


@pytest.mark.parametrize("values", [[], [np.nan, 1.0], [np.inf, np.nan]])
def test_what_a_report_holds_is_what_its_json_holds(values: list[float]) -> None:
    answers = [{"y": np.array([values])}, {"y": np.array([[1.0] * len(values)])}]
    for figures in (describe(answers), compare(answers[1:], answers[:1])):
        assert orjson.loads(orjson.dumps(figures)) == figures


async def test_the_parsed_model_is_dropped_before_its_trial(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have 500 MB, and a session has a copy of its own."""
    parsed: list[weakref.ref[Any]] = []
    check, trial_answers = optimise.check, optimise.trial_answers

    class Parsed:
        """A ModelProto, which has no weak references."""

        def __init__(self, model: onnx.ModelProto) -> None:
            self._model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self._model, name)

    def note(model: onnx.ModelProto, limits: Any) -> tuple[Any, list[str]]:
        checked, changes = check(model, limits)
        noted = Parsed(checked)
        parsed.append(weakref.ref(noted))
        return noted, changes

    def answer(original: Path, seed: int) -> Any:
        assert [model() for model in parsed] == [None]
        return trial_answers(original, seed)

    monkeypatch.setattr(optimise, "check", note)
    monkeypatch.setattr(optimise, "trial_answers", answer)
    directory = bench.directory()
    params = ConversionParams.model_validate(PARAMS)
    work = Work("conversion", "onnx", params, {"model": saved(network(opset=13), directory / "model")}, directory)
    open_toolchain.optimise(work)
    assert parsed


@pytest.mark.parametrize(
    "run",
    [
        lambda path: tflite.to_onnx(path, path),
        lambda _path: optimise.convert(network(opset=13), 17),
    ],
    ids=["tflite", "opset"],
)
def test_a_lack_of_memory_is_not_called_a_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Path], object]
) -> None:
    def without_memory(*_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(tflite, "convert", without_memory)
    monkeypatch.setattr(version_converter, "convert_version", without_memory)
    file = tmp_path / "model"
    file.touch()
    with pytest.raises(MemoryError):
        run(file)


def test_a_worker_without_the_tflite_extra_leaves_the_model_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tflite, "convert", None)
    file = tmp_path / "model"
    file.touch()
    with pytest.raises(Retryable) as left:
        tflite.to_onnx(file, file)
    assert left.value.code == "toolchain_missing"


def test_one_reference_image_is_in_memory_at_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 images of 50 megapixels are allowed."""
    decoded: list[weakref.ref[Image.Image]] = []
    most_at_once: list[int] = []
    resize = Image.Image.resize

    def note(picture: Image.Image, *arguments: Any) -> Image.Image:
        decoded.append(weakref.ref(picture))
        most_at_once.append(sum(other() is not None for other in decoded))
        return resize(picture, *arguments)

    monkeypatch.setattr(Image.Image, "resize", note)
    limits, inputs = ModelLimits(), [{"name": "x", "type": "float", "shape": [1, 3, 16, 16]}]
    made = samples(pictures(tmp_path / "references", 4), inputs, Preprocessing(), limits, 0)
    assert (len(made), made.origin) == (4, "reference images")
    assert most_at_once == [1] * 4


def test_a_reference_image_of_16_bits_is_not_clipped_to_white(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.linspace(0, 65_535, 16 * 16).reshape(16, 16).astype(np.uint16)).save(stream, "PNG")
    inputs = [{"name": "x", "type": "float", "shape": [1, 1, 16, 16]}]
    preprocessing = Preprocessing(mean=(0.0, 0.0, 0.0), scale=(1.0, 1.0, 1.0))
    (sample,) = samples(archive(tmp_path / "references", [stream.getvalue()]), inputs, preprocessing, ModelLimits(), 0)
    assert sample["x"].mean() == pytest.approx(0.5, abs=0.01)


def test_the_answers_of_one_reference_image_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a model that marks each pixel, to 100 images, have gigabytes."""
    answers: list[weakref.ref[np.ndarray[Any, Any]]] = []
    most_at_once = 0

    class Noting(Runnable):
        def run(self, inputs: Any) -> running.Tensors:
            nonlocal most_at_once
            most_at_once = max(most_at_once, sum(other() is not None for other in answers))
            answer = super().run(inputs)
            answers.extend(weakref.ref(values) for values in answer.values())
            return answer

    monkeypatch.setattr(open_toolchain, "Runnable", Noting)
    (out := tmp_path / "out").mkdir()
    model, references = saved(network(), tmp_path / "model"), pictures(tmp_path / "references", 5)
    params = ConversionParams(**PARAMS, enable_sim_fp=True, enable_sim_fixed=True)
    made = open_toolchain.optimise(Work("conversion", "onnx", params, {"model": model}, out))
    files = {name: file.path for name, file in made.files.items()} | {"references": references}
    answers.clear()
    open_toolchain.quantise(Work("conversion", "bie", params, files, out))
    assert len(answers) == 2 * 5
    assert most_at_once <= 2, "of the float and of the int8 model"


@pytest.mark.parametrize("count", [0, 5], ids=["generated", "reference images"])
def test_samples_that_need_much_memory_are_made_again_and_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """100 images for an input of 2048 x 2048 pixels would have 5 GB."""
    made: list[weakref.ref[np.ndarray[Any, Any]]] = []
    most_at_once = 0

    def noted(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_note(*arguments: Any) -> Any:
            nonlocal most_at_once
            most_at_once = max(most_at_once, sum(other() is not None for other in made))
            sample = make(*arguments)
            made.extend(weakref.ref(values) for values in sample.values())
            return sample

        return make_and_note

    for name in ("_sample_of", "random_tensors"):
        monkeypatch.setattr(references, name, noted(getattr(references, name)))
    (out := tmp_path / "out").mkdir()
    (images := tmp_path / "references").touch()
    if count:
        pictures(images, count)
    params = ConversionParams(**PARAMS, enable_evaluate=True, enable_sim_fp=True, enable_sim_fixed=True)
    model = {"model": saved(network(), tmp_path / "model")}
    optimised = open_toolchain.optimise(Work("conversion", "onnx", params, model, out))
    files = {name: file.path for name, file in optimised.files.items()}
    written = []
    for kept in (10**9, 2 * 3 * 16 * 16 * 4):  # all of them, and two
        monkeypatch.setattr(references, "_KEPT_BYTES", kept)
        made.clear()
        most_at_once = 0
        work = Work("conversion", "bie", params, files | {"references": images}, out)
        written.append({name: file.path.read_bytes() for name, file in open_toolchain.quantise(work).files.items()})
    assert written[0] == written[1]
    assert most_at_once <= 2 + 1, "those that are kept, and the one before"
    assert len(made) > (count or 16)


def test_figures_of_all_samples_are_those_of_one_large_sample() -> None:
    rng = np.random.default_rng(3)
    reference = [rng.standard_normal((2, 7)) * scale for scale in (1.0, 20.0, 0.0)]
    answers = [values + rng.standard_normal((2, 7)) * 0.1 for values in reference]
    together = compare([{"y": np.concatenate(reference)}], [{"y": np.concatenate(answers)}])["y"]
    one_by_one = compare([{"y": values} for values in reference], [{"y": values} for values in answers])["y"]
    for name in ("snr_db", "cosine", "max_error"):
        assert one_by_one[name] == pytest.approx(together[name], rel=1e-12), name


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("answer", [np.full((1, 2), np.nan), np.zeros((1, 3))], ids=["not finite", "another shape"])
def test_one_sample_whose_answer_is_no_answer_makes_the_output_infinitely_different(
    odd: int, answer: np.ndarray[Any, Any]
) -> None:
    reference = [{"y": np.ones((1, 2))}] * 3
    answers = [{"y": answer if number == odd else np.ones((1, 2))} for number in range(3)]
    figures = compare(reference, answers)["y"]
    assert (figures["snr_db"], figures["cosine"], figures["max_error"]) == (-200.0, 0.0, LARGEST_FLOAT)


@pytest.mark.parametrize("reason", ["", " . ", "\n\x00"])
def test_a_refusal_without_a_reason_is_a_whole_sentence(reason: str) -> None:
    assert refusals.invalid_model(reason).message == "The model breaks the ONNX standard: the tool gave no reason."


async def test_packaging_holds_one_model_at_a_time_and_reads_it_from_its_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = bench.directory()
    made = await bench.convert(saved(network(opset=17), directory / "model"), pictures(directory / "references", 2))
    parsed: list[weakref.ref[Any]] = []
    ran: list[bytes | Path] = []
    load, compile_graph = onnx.load_model, running.compile_graph

    class Parsed:
        """A ModelProto, which has no weak references."""

        def __init__(self, model: onnx.ModelProto) -> None:
            self.graph = model.graph

    def note_load(*arguments: Any, **named: Any) -> Parsed:
        model = Parsed(load(*arguments, **named))
        parsed.append(weakref.ref(model))
        return model

    def check_none_is_open(source: Path, target: Path) -> None:
        assert [model() for model in parsed] == [None] * len(parsed)
        compile_graph(source, target)

    class Noting(Runnable):
        def __init__(self, model: bytes | Path) -> None:
            assert [parsed_model() for parsed_model in parsed] == [None]
            ran.append(model)
            super().__init__(model)

    monkeypatch.setattr(onnx, "load_model", note_load)
    monkeypatch.setattr(open_toolchain, "compile_graph", check_none_is_open)
    monkeypatch.setattr(open_toolchain, "Runnable", Noting)
    (out := directory / "packed").mkdir()
    work = Work("conversion", "nef", ConversionParams(**PARAMS), made, out)
    open_toolchain.package(work)
    assert [type(model) for model in ran] == [type(work.directory)]
