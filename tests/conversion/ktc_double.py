"""A recorded double of the vendor's package `ktc`: the calls of its public manual, with their signatures, and no more.

It is no toolchain: it writes marked files. What it checks is that the adapter calls as the manual says.
"""

from __future__ import annotations

# ruff: noqa: FBT002 - the manual's signatures
import inspect
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx


class Recording:
    """Every call, by name and by its arguments as they were bound to the manual's signature."""

    def __init__(self, *, fuse_bn_fails: bool = False, compile_says: str | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._fuse_bn_fails = fuse_bn_fails
        self._compile_says = compile_says
        self.module = ModuleType("ktc")
        self.module.__dict__.update(
            onnx_optimizer=SimpleNamespace(
                tflite2onnx_flow=self.tflite2onnx_flow,
                onnx1_4to1_6=self.onnx1_4to1_6,
                onnx2onnx_flow=self.onnx2onnx_flow,
            ),
            ModelConfig=self.ModelConfig,
            kneron_inference=self.kneron_inference,
            compile=self.compile,
        )

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def arguments(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]

    def _record(self, frame: Any) -> None:
        name = frame.f_code.co_name
        said = inspect.getargvalues(frame)
        self.calls.append((name, {one: said.locals[one] for one in said.args if one not in ("self", "recording")}))

    def tflite2onnx_flow(self, path: str, release_mode: bool = True, bottom_nodes: Any = ()) -> onnx.ModelProto:
        self._record(inspect.currentframe())
        return onnx.load(Path(path).with_suffix(".converted.onnx"))

    def onnx1_4to1_6(self, model: onnx.ModelProto) -> onnx.ModelProto:
        self._record(inspect.currentframe())
        return model

    def onnx2onnx_flow(
        self,
        m: onnx.ModelProto,
        disable_fuse_bn: bool = False,
        bgr: bool = False,
        norm: bool = False,
        rgba2yynn: bool = False,
        eliminate_tail: bool = False,
        opt_matmul: bool = False,
        opt_720: bool = False,
        duplicate_shared_weights: bool = True,
    ) -> onnx.ModelProto:
        self._record(inspect.currentframe())
        if self._fuse_bn_fails and not disable_fuse_bn:
            raise KeyError("a name")
        return m

    def ModelConfig(  # noqa: N802 - the manual's name
        self,
        id: int,  # noqa: A002 - the manual's name
        version: str,
        platform: str,
        onnx_model: Any = None,
        onnx_path: str | None = None,
        bie_path: str | None = None,
    ) -> Config:
        self._record(inspect.currentframe())
        return Config(self)

    def kneron_inference(
        self,
        pre_results: list[np.ndarray[Any, Any]],
        nef_file: str = "",
        bie_file: str = "",
        onnx_file: str = "",
        model_id: int | None = None,
        input_names: list[str] | None = None,
        platform: int = 520,
    ) -> list[np.ndarray[Any, Any]]:
        self._record(inspect.currentframe())
        return [np.array([[1.0, 2.0, 3.0]], np.float32) + (0.01 if bie_file else 0)]

    def compile(self, model_list: list[Any], output_dir: str | None = None) -> str:
        self._record(inspect.currentframe())
        if self._compile_says is not None:
            raise RuntimeError(self._compile_says)
        path = Path(str(output_dir)) / "models_720.nef"
        path.write_bytes(b"recorded nef")
        return str(path)


class Config:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def evaluate(self) -> str:
        self._recording._record(inspect.currentframe())
        return "fps: 30"

    def analysis(self, input_mapping: dict[str, Any], output_dir: str | None = None, threads: int = 4) -> str:
        self._recording._record(inspect.currentframe())
        path = Path(str(output_dir)) / "input.kdp720.scaled.quan.wqbi.bie"
        path.write_bytes(b"recorded bie")
        return str(path)
