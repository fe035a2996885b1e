"""The vendor's toolchain, called as its manual says: against a recorded double: the real one is in its image."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work
from leasehold.pipelines.conversion.pipeline import ConversionParams
from leasehold.pipelines.conversion.steps import optimise_model, package_model, quantise_model
from tests.conversion.ktc_double import Recording
from tests.conversion.models import network, pictures, saved

HANDLERS = {"onnx": optimise_model, "bie": quantise_model, "nef": package_model}


class Stage:
    """The steps of one job, called directly: a fence would keep the double out."""

    def __init__(self, directory: Path, **params: Any) -> None:
        self._directory = directory
        self.params = ConversionParams(model_id=40000, version="0001", platform="720", toolchain="kneron", **params)
        self.files = {"references": pictures(directory / "references", 3)}

    def run(self, step: str) -> Done:
        directory = self._directory / step
        directory.mkdir()
        done: Done = HANDLERS[step](Work("conversion", step, self.params, self.files, directory))
        self.files |= {name: file.path for name, file in done.files.items()}
        return done


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    made = Recording()
    monkeypatch.setitem(sys.modules, "ktc", made.module)
    return made


def test_a_model_goes_through_the_vendors_three_stages(tmp_path: Path, recording: Recording) -> None:
    stage = Stage(tmp_path, enable_evaluate=True, enable_sim_fp=True, enable_sim_fixed=True, enable_sim_hw=True)
    stage.files["model"] = saved(network(opset=11), tmp_path / "model")
    for step in HANDLERS:
        stage.run(step)
    assert stage.files["output/out.nef"].read_bytes() == b"recorded nef"
    assert recording.names() == [
        "onnx2onnx_flow", "ModelConfig", "evaluate", "analysis", *["kneron_inference"] * 6,
        "ModelConfig", "compile", *["kneron_inference"] * 3,
    ]  # fmt: skip
    first, second = recording.arguments("ModelConfig")
    assert (first["id"], first["version"], first["platform"]) == (40000, "0001", "720")
    assert Path(first["onnx_path"]).is_absolute()
    assert Path(second["bie_path"]).is_absolute()
    (analysis,) = recording.arguments("analysis")
    assert [array.shape for array in analysis["input_mapping"]["x"]] == [(1, 3, 16, 16)] * 3
    assert analysis["threads"] == 1
    assert {call["platform"] for call in recording.arguments("kneron_inference")} == {720}
    assert recording.arguments("kneron_inference")[-1]["model_id"] == 40000
    report = stage.files["output/report.json"].read_text()
    assert '"sim_hw"' in report
    assert '"fps: 30"' in report


def test_only_what_was_asked_for_is_simulated(tmp_path: Path, recording: Recording) -> None:
    stage = Stage(tmp_path)
    stage.files["model"] = saved(network(opset=11), tmp_path / "model")
    for step in HANDLERS:
        stage.run(step)
    assert recording.names() == ["onnx2onnx_flow", "ModelConfig", "analysis", "ModelConfig", "compile"]


def test_an_old_opset_and_names_that_cannot_be_fused_take_the_manuals_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(fuse_bn_fails=True)
    monkeypatch.setitem(sys.modules, "ktc", recording.module)
    stage = Stage(tmp_path)
    stage.files["model"] = saved(network(opset=9), tmp_path / "model")
    stage.run("onnx")
    assert recording.names() == ["onnx1_4to1_6", "onnx2onnx_flow", "onnx2onnx_flow"]
    assert [call["disable_fuse_bn"] for call in recording.arguments("onnx2onnx_flow")] == [False, True]


def test_a_tflite_model_is_brought_to_onnx_first(tmp_path: Path, recording: Recording) -> None:
    stage = Stage(tmp_path)
    stage.files["model"] = tmp_path / "model.tflite"
    stage.files["model"].write_bytes(b"\x1c\0\0\0TFL3 and so on")
    saved(network(opset=11), tmp_path / "model.converted.onnx")
    stage.run("onnx")
    assert recording.names() == ["tflite2onnx_flow", "onnx2onnx_flow"]


@pytest.mark.parametrize("data", [b"\x1c\0\0\0TFL3 and so on", b"\x08\x08 and so on"], ids=["tflite", "onnx"])
def test_a_model_that_is_too_large_reaches_no_tool(tmp_path: Path, recording: Recording, data: bytes) -> None:
    stage = Stage(tmp_path, limits={"max_bytes": 10})
    stage.files["model"] = tmp_path / "model"
    stage.files["model"].write_bytes(data)
    with pytest.raises(Permanent) as refused:
        stage.run("onnx")
    assert (refused.value.code, recording.names()) == ("model_too_large", [])


def test_what_the_tools_refuse_is_told_with_a_stable_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(compile_says="undefined CPU op [Frobnicate]\nand a page of more")
    monkeypatch.setitem(sys.modules, "ktc", recording.module)
    stage = Stage(tmp_path)
    stage.files["model"] = saved(network(opset=11), tmp_path / "model")
    stage.run("onnx")
    stage.run("bie")
    with pytest.raises(Permanent) as refused:
        stage.run("nef")
    assert refused.value.code == "toolchain_failed"
    assert refused.value.message == "The vendor's compile refused the model: undefined CPU op [Frobnicate]."


def test_a_worker_without_the_vendors_package_leaves_the_job_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ktc", None)
    stage = Stage(tmp_path)
    stage.files["model"] = saved(network(), tmp_path / "model")
    with pytest.raises(Retryable) as left:
        stage.run("onnx")
    assert left.value.code == "toolchain_missing"
