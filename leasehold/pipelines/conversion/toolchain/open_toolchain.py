"""The steps of the open toolchain. They convert a model for Kneron's chips, and need only onnx, onnxslim and
onnxruntime. So they run on any machine. (Kneron's own toolchain needs Kneron's container image.) Two names are
Kneron's: BIE for the int8 model, NEF for the package.

For equal input bytes, parameters and versions, a step writes equal files. So measured times go into `Done.value`, never
into a file. A model may have 500 MB, so the steps hold few copies in memory. For this reason onnxruntime loads a model
from its path, and a step drops its parsed model before onnxruntime loads the next model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from leasehold.domain.sentences import counted
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.pipelines.conversion import nef
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import optimise as optimising
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.accuracy_guard import guard
from leasehold.pipelines.conversion.toolchain.artifacts import (
    BIE,
    BIE_REPORT,
    BINARY,
    NEF,
    ONNX,
    ONNX_REPORT,
    REPORT,
    earlier_reports,
    json_file,
    read_json,
    report_progress,
)
from leasehold.pipelines.conversion.toolchain.comparison import Comparison, Description, milliseconds
from leasehold.pipelines.conversion.toolchain.layer_sensitivity import REPORTED_LAYERS, NoisyLayer, noisiest_layers
from leasehold.pipelines.conversion.toolchain.loading import load
from leasehold.pipelines.conversion.toolchain.plain_biases import make_biases_plain
from leasehold.pipelines.conversion.toolchain.quantise import quantise_static
from leasehold.pipelines.conversion.toolchain.references import Samples, samples
from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors, compile_graph
from leasehold.pipelines.conversion.toolchain.shapes import facts_of, infer_shapes, specification
from leasehold.pipelines.conversion.toolchain.tflite import is_tflite, to_onnx

#: The agreement is the share of the samples to which the int8 model and the float model give equal top-1 answers. Below
#: this agreement, the report names the worst layers even if the parameters do not ask for them.
_GOOD_AGREEMENT = 0.95
#: The progress (in percent) that the step `quantise` reports while the accuracy guard works. The number stays the same,
#: because nobody knows how many rounds the guard needs.
_GUARD_PERCENT = 86.0
#: The members with which reports and manifests name the toolchain.
TOOLCHAIN = {
    "toolchain": "open",
    "versions": {
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "onnxslim": version("onnxslim"),
        "numpy": np.__version__,
    },
}


def optimise(work: Work) -> Done:
    """Load, check and optimise the model, and verify that the optimised model gives the same answers.

    Raises Permanent with one of the codes of refusals.py.
    """
    params: ConversionParams = work.params
    target = work.directory / "out.onnx"
    report_progress(work, 0, "loading")
    source = work.files["model"]
    if is_tflite(source):
        source = to_onnx(source, work.directory / "from-tflite.onnx")
    model = load(source, params.limits)
    report_progress(work, 5, "checking")
    opset = optimising.opset_of(model)
    # `check` also repairs the model: it sets a free batch size to 1, and lifts an old opset. `changes` has a sentence
    # for each repair.
    model, changes = optimising.check(model, params.limits)
    original_facts = facts_of(model) | {"opset": opset}
    report_progress(work, 20, "running the original")
    _save(model, target)
    del model
    answers = optimising.trial_answers(target, params.seed)
    report_progress(work, 35, "converting the opset")
    model = optimising.convert(onnx.load_model(target, load_external_data=False), params.opset)
    report_progress(work, 50, "simplifying")
    model = optimising.simplify(model)
    make_biases_plain(model)
    model = infer_shapes(model, params.limits)
    report_progress(work, 80, "comparing with the original")
    optimised_facts = facts_of(model)
    _save(model, target)
    del model
    difference = optimising.largest_difference(answers, target)
    report = optimising.difference_report(original_facts, optimised_facts, changes, difference) | TOOLCHAIN
    files = json_file(work, ONNX_REPORT, report) | {ONNX: File(target, BINARY)}
    return Done(
        files,
        {
            "operators": len(optimised_facts["operators"]),
            "parameters": optimised_facts["parameters"],
            "macs": optimised_facts["macs"],  # multiply-accumulate operations of one answer
        },
    )


def quantise(work: Work) -> Done:
    """Quantise to int8. The report compares the int8 model with the float model. The `enable_*` parameters add the
    worst layers and statistics of the outputs to the report, and timings to `Done.value`. With `accuracy_guard`, some
    layers may stay float.
    """
    params: ConversionParams = work.params
    source, target = work.files[ONNX], work.directory / "out.bie"
    report_progress(work, 0, "reading the reference images")
    model_inputs = facts_of(load(source, params.limits))["inputs"]
    inputs_to_run = samples(work.files["references"], model_inputs, params.preprocessing, params.limits, params.seed)
    quantisation = _Quantisation(work, source, target, inputs_to_run)
    agreement = quantisation.make()
    # If the agreement is too low, `guard` makes the int8 model again, with more and more of the worst layers in float.
    guarded = guard(agreement, quantisation.find_layers, quantisation.make) if params.accuracy_guard else None
    if quantisation.layers is None and (params.enable_evaluate or agreement < _GOOD_AGREEMENT):
        quantisation.find_layers()
    both_models = quantisation.both_models
    report: dict[str, Any] = TOOLCHAIN | {
        "onnx": read_json(work.files[ONNX_REPORT]),
        "calibration": {"data": inputs_to_run.origin, "samples": len(inputs_to_run)},
        "outputs": both_models.comparison.figures(),
        "bytes": {"float": source.stat().st_size, "int8": target.stat().st_size},
    }
    if quantisation.layers is not None:
        report["worst_layers"] = [layer.report() for layer in quantisation.layers[:REPORTED_LAYERS]]
    if guarded is not None:
        report["accuracy_guard"] = guarded.report()
    # `sim_fp` and `sim_fixed` are the vendor's words for statistics of the float and the int8 outputs.
    if params.enable_sim_fp:
        report["sim_fp"] = both_models.float_answers.figures()
    if params.enable_sim_fixed:
        report["sim_fixed"] = both_models.int8_answers.figures()
    value: dict[str, Any] = {name: report[name] for name in ("calibration", "outputs", "bytes")}
    if params.enable_evaluate:
        value["milliseconds"] = both_models.milliseconds
    if guarded is not None:
        value["accuracy_guard"] = guarded.summary()
    return Done(json_file(work, BIE_REPORT, report) | {BIE: File(target, BINARY)}, value)


def package(work: Work) -> Done:
    """Compile the int8 graph for onnxruntime, and package it with its report and a manifest. Then read the package and
    run its model once, to check that the package works.
    """
    params: ConversionParams = work.params
    report_progress(work, 0, "compiling")
    graph, path = work.directory / "graph.onnx", work.directory / "out.nef"
    compile_graph(work.files[BIE], graph)
    manifest = (
        TOOLCHAIN
        | {
            "platform": params.platform,
            "model_id": params.model_id,
            "version": params.version,
            "runtime": "onnxruntime",
        }
        | _inputs_and_outputs(work.files[BIE])
    )
    report_progress(work, 30, "packaging")
    files = json_file(work, REPORT, earlier_reports(work.files[BIE_REPORT]) | {"nef": manifest})
    try:
        nef.write(path, manifest, {"model.onnx": graph, "report.json": files[REPORT].path})
    except nef.BadContainer as error:  # the manifest is too large, because the model has thousands of inputs or outputs
        raise refusals.not_packageable(str(error)) from error
    report_progress(work, 60, "running the package")
    graph.write_bytes(nef.read(path).part("model.onnx"))
    packaged_model = Runnable(graph)
    packaged_model.run(packaged_model.random_input(np.random.default_rng(params.seed)))
    graph.unlink()
    return Done(files | {NEF: File(path, BINARY)}, {"bytes": path.stat().st_size, "toolchain": "open"})


def _inputs_and_outputs(path: Path) -> dict[str, Any]:
    model = onnx.load_model(path, load_external_data=False)
    return {"inputs": specification(model.graph.input), "outputs": specification(model.graph.output)}


@dataclass(slots=True)
class _BothModels:
    """The figures of the float and the int8 model. `milliseconds` maps each model to the time of one run. It is empty
    if the time was not measured.
    """

    comparison: Comparison = field(default_factory=Comparison)
    float_answers: Description = field(default_factory=Description)
    int8_answers: Description = field(default_factory=Description)
    milliseconds: dict[str, float] = field(default_factory=dict)

    def agreement(self) -> float:
        """The share of the samples to which both models give equal top-1 answers. If the models have several outputs,
        this is the smallest of their shares.
        """
        return min(output["top1_agreement"] for output in self.comparison.figures().values())

    def add(self, float_answer: Tensors, int8_answer: Tensors, params: ConversionParams) -> None:
        """Add the answers of both models to one sample."""
        self.comparison.add(float_answer, int8_answer)
        if params.enable_sim_fp:
            self.float_answers.add(float_answer)
        if params.enable_sim_fixed:
            self.int8_answers.add(int8_answer)


class _Quantisation:
    """Makes the int8 model at `target`, and compares it with the float model at `source` on `inputs`.

    `both_models`: the figures of the int8 model that was made last, and of the float model. `layers`: the layers that
    the first call of `find_layers` returned, the noisiest first. At that time no layer was kept in float. None:
    `find_layers` was not called yet.
    """

    def __init__(self, work: Work, source: Path, target: Path, inputs: Samples) -> None:
        self._work = work
        self._source = source
        self._target = target
        self._inputs = inputs
        self._params: ConversionParams = work.params
        # With the accuracy guard, the model is made several times. The file `ranges.json` keeps the ranges of the
        # tensors, so that they are measured only the first time.
        self._ranges = work.directory / "ranges.json" if self._params.accuracy_guard else None
        self.both_models = _BothModels()
        self.layers: Sequence[NoisyLayer] | None = None

    def make(self, float_layers: Sequence[NoisyLayer] = ()) -> float:
        """Make the int8 model, with `float_layers` kept in float. Returns its top-1 agreement with the float model."""
        names = [layer.name for layer in float_layers]
        quantise_static(
            self._source, self._target, self._inputs, self._on_sample, ranges=self._ranges, float_layers=names
        )
        self.both_models = _run_both(self._work, self._source, self._target, self._inputs, len(names))
        return self.both_models.agreement()

    def find_layers(self) -> Sequence[NoisyLayer]:
        """The layers of the model that was made last. The layer that adds the most noise comes first."""
        report_progress(self._work, 85 if self.layers is None else _GUARD_PERCENT, "finding the worst layers")
        layers = noisiest_layers(self._source, self._target, self._inputs, self._work.directory)
        if self.layers is None:
            self.layers = layers
        return layers

    def _on_sample(self, number: int) -> None:
        count = len(self._inputs)
        report_progress(self._work, 5 + 55 * number / count, f"calibrating on {number + 1} of {count}")


def _run_both(work: Work, float_path: Path, int8_path: Path, inputs: Samples, float_layers: int) -> _BothModels:
    """Run both models on each input. Memory holds only the answers to one input at a time. `float_layers`: how many
    layers the accuracy guard keeps in float.
    """
    params: ConversionParams = work.params
    float_model, int8_model, both_models = Runnable(float_path), Runnable(int8_path), _BothModels()
    for number, sample in enumerate(inputs):
        summary = f"comparing on {number + 1} of {len(inputs)}"
        if float_layers:
            report_progress(
                work, _GUARD_PERCENT, f"{summary}, with {counted(float_layers, 'layer', 'layers')} in float"
            )
        else:
            report_progress(work, 60 + 25 * number / len(inputs), summary)
        both_models.add(float_model.run(sample), int8_model.run(sample), params)
    if params.enable_evaluate:
        first_input = next(iter(inputs))
        both_models.milliseconds = {
            "float": milliseconds(float_model, first_input),
            "int8": milliseconds(int8_model, first_input),
        }
    return both_models


def _save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path
