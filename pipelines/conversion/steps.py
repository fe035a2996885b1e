"""The handlers of the conversion pipeline. Heavy: only the child process of a worker imports it.

Every step is deterministic in its input bytes, parameters and version, but for the times that `enable_evaluate` asks
for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxslim
import orjson

from leasehold import nef
from leasehold.verdicts import Done, File
from leasehold.work import Work
from pipelines.conversion import comparison, optimise
from pipelines.conversion.loading import load
from pipelines.conversion.pipeline import ConversionParams, conversion
from pipelines.conversion.quantise import quantised
from pipelines.conversion.references import samples
from pipelines.conversion.running import Runnable
from pipelines.conversion.shapes import facts, inferred, specification

_BINARY = "application/octet-stream"
_ONNX_REPORT, _BIE_REPORT = "onnx-report.json", "bie-report.json"
_TOOLCHAIN = {
    "toolchain": "open",
    "versions": {
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "onnxslim": onnxslim.__version__,
        "numpy": np.__version__,
    },
}


@conversion.handles("onnx")
def optimise_model(work: Work) -> Done:
    """Load safely, check, infer shapes, convert the opset, simplify, and prove that it still answers the same.

    Raises Permanent with one of the codes of refusals.py.
    """
    params: ConversionParams = work.params
    _say(work, 0, "loading")
    original = load(work.files["model"], params.limits)
    _say(work, 10, "checking")
    checked, changes = optimise.checked(original, params.limits)
    before = facts(checked)
    _say(work, 30, "converting the opset")
    current = optimise.converted(checked, params.opset)
    _say(work, 45, "simplifying")
    made = inferred(optimise.simplified(current), params.limits)
    _say(work, 75, "comparing with the original")
    apart = optimise.difference(checked, made, params.seed)
    report = optimise.report(before, made, changes, apart) | _TOOLCHAIN
    files = {
        f"output/{_ONNX_REPORT}": _json(work.directory / _ONNX_REPORT, report),
        "output/out.onnx": _model(work.directory / "out.onnx", made),
    }
    return Done(files, {"operators": len(report["optimised"]["operators"]), "macs": report["optimised"]["macs"]})


@conversion.handles("bie")
def quantise_model(work: Work) -> Done:
    """Quantise to int8, and report how far that is from float, as the parameters ask for."""
    params: ConversionParams = work.params
    _say(work, 0, "reading the reference images")
    model = load(work.files["output/out.onnx"], params.limits)
    real = Runnable(model.SerializeToString())
    inputs = facts(model)["inputs"]
    given, origin = samples(work.files["references"], real, inputs, params.preprocessing, params.limits, params.seed)

    def heard(place: int) -> None:
        _say(work, 10 + 50 * place / len(given), f"calibrating on {place + 1} of {len(given)}")

    made = quantised(model, given, work.directory, heard)
    _say(work, 70, "comparing float and int8")
    fixed = Runnable(made.SerializeToString())
    answers = [real.run(sample) for sample in given], [fixed.run(sample) for sample in given]
    bie = _model(work.directory / "out.bie", made)
    report: dict[str, Any] = _TOOLCHAIN | {
        "calibration": {"data": origin, "samples": len(given)},
        "outputs": comparison.compared(*answers),
        "bytes": {"float": work.files["output/out.onnx"].stat().st_size, "int8": bie.path.stat().st_size},
    }
    if params.enable_sim_fp:
        report["sim_fp"] = comparison.described(answers[0])
    if params.enable_sim_fixed:
        report["sim_fixed"] = comparison.described(answers[1])
    if params.enable_evaluate:
        times = {"float": comparison.milliseconds(real, given[0]), "int8": comparison.milliseconds(fixed, given[0])}
        report["evaluate"] = {"milliseconds": times}
    files = {f"output/{_BIE_REPORT}": _json(work.directory / _BIE_REPORT, report), "output/out.bie": bie}
    return Done(files, {"calibration": report["calibration"], "outputs": report["outputs"]})


@conversion.handles("nef")
def package_model(work: Work) -> Done:
    """Package the int8 model with its reports and a manifest; then read it back and run it once."""
    params: ConversionParams = work.params
    _say(work, 0, "packaging")
    model = onnx.load_model(work.files["output/out.bie"], load_external_data=False)
    manifest = _TOOLCHAIN | {
        "platform": params.platform,
        "model_id": params.model_id,
        "version": params.version,
        "runtime": "onnxruntime",
        "inputs": specification(model.graph.input),
        "outputs": specification(model.graph.output),
    }
    parts = {"model.onnx": work.files["output/out.bie"]}
    parts |= {name: work.files[f"output/{name}"] for name in (_ONNX_REPORT, _BIE_REPORT)}
    path = work.directory / "out.nef"
    nef.write(path, manifest, parts)
    _say(work, 60, "running the package")
    packed = Runnable(nef.read(path).part("model.onnx"))
    packed.run(packed.random_input(np.random.default_rng(params.seed)))
    return Done({"output/out.nef": File(path, _BINARY)}, {"bytes": path.stat().st_size, "toolchain": "open"})


def _say(work: Work, percent: float, summary: str) -> None:
    """Between the parts of a step: tell how far it is, and stop when it was asked to."""
    work.progress(percent, summary)
    work.checkpoint()


def _model(path: Path, model: onnx.ModelProto) -> File:
    path.write_bytes(model.SerializeToString(deterministic=True))
    return File(path, _BINARY)


def _json(path: Path, report: dict[str, Any]) -> File:
    path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    return File(path, "application/json")
