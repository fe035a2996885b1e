"""Recognises a TensorFlow Lite model, and converts it to ONNX if the extra `tflite` is installed. The step `onnx` calls
this module. The vendor's toolchain only calls `is_tflite`, because it has a converter of its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from leasehold.pipelines.conversion.toolchain import refusals

if find_spec("tflite2onnx") is not None:  # imported now, because a sandboxed child process cannot import it later
    from tflite2onnx import convert
else:
    convert = None

_MAGIC, _MAGIC_AT = b"TFL3", 4  # a FlatBuffers file identifier: tensorflow/compiler/mlir/lite/schema/schema.fbs


def is_tflite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_MAGIC_AT + len(_MAGIC))[_MAGIC_AT:] == _MAGIC


def to_onnx(source: Path, out: Path) -> Path:
    """Convert `source` into `out`. Raises Permanent("tflite_not_convertible"), or Retryable without the extra."""
    if convert is None:
        raise refusals.tflite_missing()
    try:
        convert(str(source), str(out))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - tflite2onnx refuses with assertions, NotImplementedError and numpy errors
        raise refusals.tflite_not_convertible(f"{type(error).__name__} {error}") from None
    return out
