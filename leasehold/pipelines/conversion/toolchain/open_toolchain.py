"""The open toolchain: onnx, onnxslim and onnxruntime; complete on any machine.

Every step is deterministic in its input bytes, parameters and version: what was timed is told in the step's value,
and in no file. A model of 500 MB is held as seldom and as briefly as may be: sessions read files, one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxslim

from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.pipelines.conversion import nef
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import comparison
from leasehold.pipelines.conversion.toolchain import optimise as optimising
from leasehold.pipelines.conversion.toolchain.artifacts import (
    BIE,
    BIE_REPORT,
    BINARY,
    NEF,
    ONNX,
    ONNX_REPORT,
    REPORT,
    as_json,
    read_json,
    say,
    whole_report,
)
from leasehold.pipelines.conversion.toolchain.layer_sensitivity import worst_layers
from leasehold.pipelines.conversion.toolchain.loading import load
from leasehold.pipelines.conversion.toolchain.quantise import quantised
from leasehold.pipelines.conversion.toolchain.references import samples
from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors, compiled
from leasehold.pipelines.conversion.toolchain.shapes import facts, inferred, specification
from leasehold.pipelines.conversion.toolchain.tflite import is_tflite, to_onnx

#: Below this share of equal answers the report says which layers are to blame, asked or not.
_GOOD_AGREEMENT = 0.95
TOOLCHAIN = {
    "toolchain": "open",
    "versions": {
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "onnxslim": onnxslim.__version__,
        "numpy": np.__version__,
    },
}


def optimise(work: Work) -> Done:
    """Load safely, check, infer shapes, convert the opset, simplify, and prove that it still answers the same.

    Raises Permanent with one of the codes of refusals.py.
    """
    params: ConversionParams = work.params
    out = work.directory / "out.onnx"
    say(work, 0, "loading")
    source = work.files["model"]
    if is_tflite(source):
        source = to_onnx(source, work.directory / "from-tflite.onnx", params.limits.max_bytes)
    model = load(source, params.limits)
    say(work, 5, "checking")
    opset = optimising.opset_of(model)
    model, changes = optimising.checked(model, params.limits)
    before = facts(model) | {"opset": opset}
    say(work, 20, "running the original")
    answers = optimising.answers(_saved(model, out), params.seed)
    say(work, 35, "converting the opset")
    model = optimising.converted(model, params.opset)
    say(work, 50, "simplifying")
    model = inferred(optimising.simplified(model), params.limits)
    say(work, 80, "comparing with the original")
    after = facts(model)
    _saved(model, out)
    del model
    apart = optimising.difference(answers, out)
    report = optimising.report(before, after, changes, apart) | TOOLCHAIN
    files = as_json(work, ONNX_REPORT, report) | {ONNX: File(out, BINARY)}
    return Done(files, {"operators": len(after["operators"]), "parameters": after["parameters"], "macs": after["macs"]})


def quantise(work: Work) -> Done:
    """Quantise to int8, and report how far that is from float, as the parameters ask for."""
    params: ConversionParams = work.params
    source, out = work.files[ONNX], work.directory / "out.bie"
    say(work, 0, "reading the reference images")
    inputs = facts(load(source, params.limits))["inputs"]
    given, origin = samples(work.files["references"], inputs, params.preprocessing, params.limits, params.seed)
    say(work, 5, "running the float model")
    real, times = _run(source, given, timed=params.enable_evaluate)

    def heard(place: int) -> None:
        say(work, 20 + 40 * place / len(given), f"calibrating on {place + 1} of {len(given)}")

    quantised(source, out, given, heard)
    say(work, 70, "comparing float and int8")
    fixed, int8_times = _run(out, given, timed=params.enable_evaluate)
    report: dict[str, Any] = TOOLCHAIN | {
        "onnx": read_json(work.files[ONNX_REPORT]),
        "calibration": {"data": origin, "samples": len(given)},
        "outputs": comparison.compared(real, fixed),
        "bytes": {"float": source.stat().st_size, "int8": out.stat().st_size},
    }
    agreement = min(output["top1_agreement"] for output in report["outputs"].values())
    if params.enable_evaluate or agreement < _GOOD_AGREEMENT:
        say(work, 85, "looking which layers are to blame")
        report["worst_layers"] = worst_layers(source, out, given, work.directory)
    if params.enable_sim_fp:
        report["sim_fp"] = comparison.described(real)
    if params.enable_sim_fixed:
        report["sim_fixed"] = comparison.described(fixed)
    value: dict[str, Any] = {name: report[name] for name in ("calibration", "outputs", "bytes")}
    if params.enable_evaluate:
        value["milliseconds"] = {"float": times, "int8": int8_times}
    return Done(as_json(work, BIE_REPORT, report) | {BIE: File(out, BINARY)}, value)


def package(work: Work) -> Done:
    """Compile the int8 graph for onnxruntime, package it with its report and a manifest, read it back and run it."""
    params: ConversionParams = work.params
    say(work, 0, "compiling")
    model = onnx.load_model(work.files[BIE], load_external_data=False)
    graph, path = work.directory / "graph.onnx", work.directory / "out.nef"
    compiled(work.files[BIE], graph)
    manifest = TOOLCHAIN | {
        "platform": params.platform,
        "model_id": params.model_id,
        "version": params.version,
        "runtime": "onnxruntime",
        "inputs": specification(model.graph.input),
        "outputs": specification(model.graph.output),
    }
    say(work, 30, "packaging")
    files = as_json(work, REPORT, whole_report(work.files[BIE_REPORT]) | {"nef": manifest})
    nef.write(path, manifest, {"model.onnx": graph, "report.json": files[REPORT].path})
    say(work, 60, "running the package")
    packed = Runnable(nef.read(path).part("model.onnx"))
    packed.run(packed.random_input(np.random.default_rng(params.seed)))
    graph.unlink()
    return Done(files | {NEF: File(path, BINARY)}, {"bytes": path.stat().st_size, "toolchain": "open"})


def _run(path: Path, given: list[Tensors], *, timed: bool) -> tuple[list[Tensors], float | None]:
    """What the model answers to each, and how long it takes for one, in milliseconds."""
    model = Runnable(path)
    return [model.run(sample) for sample in given], comparison.milliseconds(model, given[0]) if timed else None


def _saved(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path
