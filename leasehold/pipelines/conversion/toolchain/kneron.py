"""The vendor's toolchain: its package `ktc`, which exists only in the vendor's container image, by its public manual.

**Not runnable without that image**: it is tested against a recorded double of the documented calls, and nothing else.
The vendor's tools start programs of their own; an image that carries them decides how a worker's fence lets them.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from leasehold.domain.errors import Permanent, Retryable, StepError
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.toolchain import comparison, refusals
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
from leasehold.pipelines.conversion.toolchain.loading import load
from leasehold.pipelines.conversion.toolchain.references import samples
from leasehold.pipelines.conversion.toolchain.running import Tensors
from leasehold.pipelines.conversion.toolchain.shapes import facts, fix_inputs

_TFLITE = b"TFL3"  # at byte 4 of the file
_OLD_OPSET = 11  # older ones go through the vendor's converter from ONNX 1.4
_MAX_TEXT = 10_000
#: One thread: the analyser's memory grows with them, and its abort means that there was too little.
_THREADS = 1


def optimise(work: Work) -> Done:
    """To ONNX where it is .tflite, then the vendor's own optimiser. Raises Permanent, or Retryable without `ktc`."""
    params: ConversionParams = work.params
    tools = _ktc().onnx_optimizer
    source = work.files["model"]
    if source.read_bytes()[4:8] == _TFLITE:
        say(work, 0, "converting from TFLite")
        model = _called(tools.tflite2onnx_flow, str(source.absolute()), release_mode=True, bottom_nodes=[])
        before = facts(model)
    else:
        say(work, 0, "loading")
        model = load(source, params.limits)
        fix_inputs(model)
        before = facts(model)
        if before["opset"] < _OLD_OPSET:
            model = _called(tools.onnx1_4to1_6, model)
    say(work, 30, "optimising")
    model = _optimised(tools, model)
    out = work.directory / "out.onnx"
    onnx.save(model, out)
    after = facts(model)
    report = {"toolchain": "kneron", "original": before, "optimised": after}
    return Done(as_json(work, ONNX_REPORT, report) | {ONNX: File(out, BINARY)}, {"macs": after["macs"]})


def _optimised(tools: Any, model: onnx.ModelProto) -> onnx.ModelProto:
    """Fusing batch normalisations trips over some names: then without, as the manual advises."""
    made: onnx.ModelProto
    try:
        made = _called(tools.onnx2onnx_flow, model, disable_fuse_bn=False, eliminate_tail=True)
    except Permanent:
        made = _called(tools.onnx2onnx_flow, model, disable_fuse_bn=True, eliminate_tail=True)
    return made


def quantise(work: Work) -> Done:
    """Analyse with the reference images; compare with float where that was asked for."""
    params: ConversionParams = work.params
    ktc, source = _ktc(), work.files[ONNX].absolute()
    inputs = facts(load(source, params.limits))["inputs"]
    given, origin = samples(work.files["references"], inputs, params.preprocessing, params.limits, params.seed)
    config = _config(ktc, params, onnx_path=str(source))
    report: dict[str, Any] = {
        "toolchain": "kneron",
        "onnx": read_json(work.files[ONNX_REPORT]),
        "calibration": {"data": origin, "samples": len(given)},
    }
    if params.enable_evaluate:
        say(work, 5, "evaluating")
        report["evaluate"] = str(_called(config.evaluate))[:_MAX_TEXT]
    say(work, 15, "analysing")
    mapping = {name: [sample[name] for sample in given] for name in given[0]}
    made = _called(config.analysis, mapping, output_dir=str(work.directory.absolute()), threads=_THREADS)
    out = _kept(made, work.directory / "out.bie")
    simulated = {}
    if params.enable_sim_fp:
        say(work, 70, "simulating in float")
        simulated["sim_fp"] = [_inference(ktc, params, sample, onnx_file=str(source)) for sample in given]
    if params.enable_sim_fixed:
        say(work, 80, "simulating in fixed point")
        simulated["sim_fixed"] = [_inference(ktc, params, sample, bie_file=str(out.absolute())) for sample in given]
    report |= {name: comparison.described(answers) for name, answers in simulated.items()}
    if len(simulated) > 1:
        report["outputs"] = comparison.compared(simulated["sim_fp"], simulated["sim_fixed"])
    value: dict[str, Any] = {name: report[name] for name in ("calibration", "outputs") if name in report}
    return Done(as_json(work, BIE_REPORT, report) | {BIE: File(out, BINARY)}, value)


def package(work: Work) -> Done:
    """Compile for the chip: the vendor's own binary, as it is."""
    params: ConversionParams = work.params
    ktc, bie = _ktc(), work.files[BIE].absolute()
    say(work, 0, "compiling")
    config = _config(ktc, params, bie_path=str(bie))
    made = _called(ktc.compile, [config], output_dir=str(work.directory.absolute()))
    out = _kept(made, work.directory / "out.nef")
    report = whole_report(work.files[BIE_REPORT])
    if params.enable_sim_hw:
        say(work, 60, "simulating the hardware")
        inputs = report["onnx"]["optimised"]["inputs"]
        given, _ = samples(work.files["references"], inputs, params.preprocessing, params.limits, params.seed)
        answers = [
            _inference(ktc, params, sample, nef_file=str(out.absolute()), model_id=params.model_id) for sample in given
        ]
        report["sim_hw"] = comparison.described(answers)
    files = as_json(work, REPORT, report) | {NEF: File(out, BINARY)}
    return Done(files, {"bytes": out.stat().st_size, "toolchain": "kneron"})


def _ktc() -> Any:
    try:
        return importlib.import_module("ktc")
    except ImportError as error:
        raise Retryable("This worker has no vendor toolchain; another may.", code="toolchain_missing") from error


def _config(ktc: Any, params: ConversionParams, **source: str) -> Any:
    return _called(ktc.ModelConfig, params.model_id, params.version, params.platform, **source)


def _inference(ktc: Any, params: ConversionParams, sample: Tensors, **source: Any) -> Tensors:
    answers = _called(
        ktc.kneron_inference,
        list(sample.values()),
        input_names=list(sample),
        platform=int(params.platform),
        **source,
    )
    return {f"output_{number}": np.asarray(answer) for number, answer in enumerate(answers)}


def _called(tool: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Whatever the vendor's tools raise is the model's fault; memory that they lack ends the child by itself."""
    try:
        return tool(*arguments, **options)
    except (MemoryError, StepError):
        raise
    except Exception as error:
        raise refusals.toolchain_failed(getattr(tool, "__name__", "tool"), str(error).partition("\n")[0]) from error


def _kept(made: str, target: Path) -> Path:
    """The tools choose their own names, in the directory that they were given."""
    if Path(made) != target.absolute():
        shutil.move(made, target)
    return target
