"""The steps of a conversion (optimise, quantise, package) with the toolchain of the vendor Kneron. They call the
vendor's Python package `ktc` as its public manual says. The vendor's names are BIE for the int8 model, and NEF for the
package that a chip loads.

**`ktc` exists only in the vendor's container image.** So the tests use a replacement of `ktc`, which records the
documented calls. The vendor's tools start other programs. So in a worker of such an image, the sandbox (which confines
the worker's child processes) must be configured to allow these programs.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from leasehold.domain.errors import Permanent, Retryable, StepError
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import refusals
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
from leasehold.pipelines.conversion.toolchain.comparison import Comparison, Description
from leasehold.pipelines.conversion.toolchain.loading import load
from leasehold.pipelines.conversion.toolchain.references import Samples, samples
from leasehold.pipelines.conversion.toolchain.running import Tensors
from leasehold.pipelines.conversion.toolchain.shapes import facts_of, fix_inputs
from leasehold.pipelines.conversion.toolchain.tflite import is_tflite

_OLD_OPSET = 11  # models of an older opset go through the vendor's converter from ONNX 1.4 to 1.6
_MAX_REPORT_CHARACTERS = 10_000  # the most characters of the vendor's evaluation that our report quotes
#: The threads of the vendor's analyser. The analyser gets only one thread, because each thread needs more memory, and
#: the analyser aborts if memory is short.
_THREADS = 1


def optimise(work: Work) -> Done:
    """Convert the model to ONNX if it is a .tflite model, then run the vendor's optimiser.

    Raises Retryable if this worker has no `ktc`, and Permanent if the model is refused.
    """
    params: ConversionParams = work.params
    tools = _ktc().onnx_optimizer
    source = work.files["model"]
    if is_tflite(source):
        report_progress(work, 0, "converting from TFLite")
        model = _call(tools.tflite2onnx_flow, str(source.absolute()), release_mode=True, bottom_nodes=[])
        before = facts_of(model)
    else:
        report_progress(work, 0, "loading")
        model = load(source, params.limits)
        fix_inputs(model)
        before = facts_of(model)
        if before["opset"] < _OLD_OPSET:
            model = _call(tools.onnx1_4to1_6, model)
    report_progress(work, 30, "optimising")
    model = _optimise_graph(tools, model)
    target = work.directory / "out.onnx"
    onnx.save(model, target)
    after = facts_of(model)
    report = {"toolchain": "kneron", "original": before, "optimised": after}
    return Done(json_file(work, ONNX_REPORT, report) | {ONNX: File(target, BINARY)}, {"macs": after["macs"]})


def _optimise_graph(tools: Any, model: onnx.ModelProto) -> onnx.ModelProto:
    """Optimise the model and fuse batch normalisations. For some models the fusing fails because of the names of their
    nodes. If it fails, optimise without fusing, as the manual advises.
    """
    optimised: onnx.ModelProto
    try:
        optimised = _call(tools.onnx2onnx_flow, model, disable_fuse_bn=False, eliminate_tail=True)
    except Permanent:
        optimised = _call(tools.onnx2onnx_flow, model, disable_fuse_bn=True, eliminate_tail=True)
    return optimised


def quantise(work: Work) -> Done:
    """Quantise with the reference images. Then simulate in float and in fixed point, as far as the parameters ask for
    it.
    """
    params: ConversionParams = work.params
    ktc, source = _ktc(), work.files[ONNX].absolute()
    inputs = facts_of(load(source, params.limits))["inputs"]
    inputs_to_run = samples(work.files["references"], inputs, params.preprocessing, params.limits, params.seed)
    config = _config(ktc, params, onnx_path=str(source))
    report: dict[str, Any] = {
        "toolchain": "kneron",
        "onnx": read_json(work.files[ONNX_REPORT]),
        "calibration": {"data": inputs_to_run.origin, "samples": len(inputs_to_run)},
    }
    if params.enable_evaluate:
        report_progress(work, 5, "evaluating")
        report["evaluate"] = str(_call(config.evaluate))[:_MAX_REPORT_CHARACTERS]
    report_progress(work, 15, "analysing")
    bie_path = _call(
        config.analysis, _by_input(inputs_to_run), output_dir=str(work.directory.absolute()), threads=_THREADS
    )
    target = _move(bie_path, work.directory / "out.bie")
    simulated_files = {}
    if params.enable_sim_fp:
        simulated_files["sim_fp"] = {"onnx_file": str(source)}
    if params.enable_sim_fixed:
        simulated_files["sim_fixed"] = {"bie_file": str(target.absolute())}
    report |= _simulations(work, ktc, inputs_to_run, simulated_files)
    value: dict[str, Any] = {name: report[name] for name in ("calibration", "outputs") if name in report}
    return Done(json_file(work, BIE_REPORT, report) | {BIE: File(target, BINARY)}, value)


def _by_input(inputs: Samples) -> dict[str, list[np.ndarray[Any, Any]]]:
    """The values of all samples by the name of the input, as the vendor's analysis expects them."""
    values_by_input: dict[str, list[np.ndarray[Any, Any]]] = {}
    for sample in inputs:
        for name, values in sample.items():
            values_by_input.setdefault(name, []).append(values)
    return values_by_input


def _simulations(work: Work, ktc: Any, inputs: Samples, files: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Simulate each model in `files` on all samples. Returns the members for the report: a description of each model's
    answers and, if there are two models, a comparison. Memory holds the answers to one sample at a time.

    `files`: the name of a simulation -> the keyword argument with which `_simulate` gets the model's file.
    """
    if not files:
        return {}
    descriptions, compared = {name: Description() for name in files}, Comparison()
    for number, sample in enumerate(inputs):
        report_progress(work, 70 + 25 * number / len(inputs), f"simulating on {number + 1} of {len(inputs)}")
        answers = {name: _simulate(ktc, work.params, sample, **file) for name, file in files.items()}
        for name, answer in answers.items():
            descriptions[name].add(answer)
        if len(answers) == 2:  # noqa: PLR2004 - both simulations
            compared.add(answers["sim_fp"], answers["sim_fixed"])
    figures: dict[str, Any] = {name: description.figures() for name, description in descriptions.items()}
    return figures | ({"outputs": outputs} if (outputs := compared.figures()) else {})


def package(work: Work) -> Done:
    """Compile for the chip. The output is the vendor's own binary, unchanged."""
    params: ConversionParams = work.params
    ktc, bie = _ktc(), work.files[BIE].absolute()
    report_progress(work, 0, "compiling")
    config = _config(ktc, params, bie_path=str(bie))
    nef_path = _call(ktc.compile, [config], output_dir=str(work.directory.absolute()))
    target = _move(nef_path, work.directory / "out.nef")
    report = earlier_reports(work.files[BIE_REPORT])
    if params.enable_sim_hw:
        report_progress(work, 60, "simulating the hardware")
        inputs = report["onnx"]["optimised"]["inputs"]
        inputs_to_run = samples(work.files["references"], inputs, params.preprocessing, params.limits, params.seed)
        description = Description()
        for sample in inputs_to_run:
            description.add(_simulate(ktc, params, sample, nef_file=str(target.absolute()), model_id=params.model_id))
        report["sim_hw"] = description.figures()
    files = json_file(work, REPORT, report) | {NEF: File(target, BINARY)}
    return Done(files, {"bytes": target.stat().st_size, "toolchain": "kneron"})


def _ktc() -> Any:
    try:
        return importlib.import_module("ktc")
    except ImportError as error:
        raise Retryable(
            "This worker does not have the vendor's toolchain. Another worker may have it.", code="toolchain_missing"
        ) from error


def _config(ktc: Any, params: ConversionParams, **source: str) -> Any:
    return _call(ktc.ModelConfig, params.model_id, params.version, params.platform, **source)


def _simulate(ktc: Any, params: ConversionParams, sample: Tensors, **source: Any) -> Tensors:
    """The model's answer to one sample. `source`: arguments of `ktc` that name the model's file, such as `bie_file`."""
    answers = _call(
        ktc.kneron_inference,
        list(sample.values()),
        input_names=list(sample),
        platform=int(params.platform),
        **source,
    )
    return {f"output_{number}": np.asarray(answer) for number, answer in enumerate(answers)}


def _call(tool: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a tool of the vendor. An error of the tool becomes a Permanent, as if the model had caused it. A lack of
    memory is the exception: MemoryError passes unchanged.
    """
    try:
        return tool(*arguments, **options)
    except (MemoryError, StepError):
        raise
    except Exception as error:
        raise refusals.toolchain_failed(getattr(tool, "__name__", "tool"), str(error).partition("\n")[0]) from error


def _move(source: str, target: Path) -> Path:
    """Move a tool's output `source` to `target`, because the tools choose their file names. Returns `target`."""
    if Path(source) != target.absolute():
        shutil.move(source, target)
    return target
