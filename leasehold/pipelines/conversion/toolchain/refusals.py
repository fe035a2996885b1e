"""Every reason for which a model or its reference images are refused: a stable code and a sentence for the owner.

Nearly all are `Permanent`, because another attempt would fail in the same way. A reason that comes from a tool is cut
to _MAX_CHARACTERS, because the tool may quote a large part of the file.
"""

from __future__ import annotations

from leasehold.domain.errors import Permanent, Retryable

_MAX_CHARACTERS = 300  # the most characters of a tool's reason


def _one_line(reason: str) -> str:
    """The reason as one printable line, without a full stop at its end. The line is never empty."""
    line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    return line[:_MAX_CHARACTERS].rstrip(". ") or "the tool gave no reason"


def not_onnx(reason: str) -> Permanent:
    return Permanent("not_onnx", f"The file is not an ONNX model: {_one_line(reason)}.")


def model_too_large(size: int, limit: int) -> Permanent:
    return Permanent("model_too_large", f"The model has {size} bytes; at most {limit} are accepted.")


def too_many_nodes(limit: int) -> Permanent:
    return Permanent("too_many_nodes", f"The model has more than {limit} nodes.")


def tensor_too_large(name: str, size: int, limit: int) -> Permanent:
    return Permanent("tensor_too_large", f"The tensor {name[:100]!r} has {size} bytes; at most {limit} are accepted.")


def activations_too_large(size: int, limit: int) -> Permanent:
    return Permanent("activations_too_large", f"The model's tensors have {size} bytes; at most {limit} are accepted.")


def external_data(name: str) -> Permanent:
    return Permanent(
        "external_data", f"The tensor {name[:100]!r} lies outside the file; send one file with all weights."
    )


def unsupported_operators(names: list[str]) -> Permanent:
    return Permanent("unsupported_operators", f"Not operators of the ONNX standard: {_one_line(', '.join(names))}.")


def unsupported_opset(version: int, newest: int) -> Permanent:
    return Permanent("unsupported_opset", f"The model is of opset {version}; the opsets 1 to {newest} are accepted.")


def opset_not_convertible(target: int, reason: str) -> Permanent:
    return Permanent("opset_not_convertible", f"The model cannot be brought to opset {target}: {_one_line(reason)}.")


def invalid_model(reason: str) -> Permanent:
    return Permanent("invalid_model", f"The model breaks the ONNX standard: {_one_line(reason)}.")


def not_serialisable() -> Permanent:
    return Permanent(
        "not_serialisable", "The model cannot be written to a file: with its computed constants it exceeds 2 GB."
    )


def missing_shapes(name: str, what_is_missing: str) -> Permanent:
    """`what_is_missing`: the end of a sentence about the input, such as "has no shape"."""
    return Permanent("missing_shapes", f"The input {name[:100]!r} {what_is_missing}.")


def not_runnable(reason: str) -> Permanent:
    return Permanent("not_runnable", f"The model does not run: {_one_line(reason)}.")


def not_equivalent(difference: float) -> Permanent:
    return Permanent("not_equivalent", f"The optimised model's answers differ from the original's by {difference:g}.")


def not_quantisable(reason: str) -> Permanent:
    return Permanent("not_quantisable", f"The model cannot be quantised: {_one_line(reason)}.")


def not_packageable(reason: str) -> Permanent:
    return Permanent("not_packageable", f"The model cannot be packaged: {_one_line(reason)}.")


def bad_references(reason: str) -> Permanent:
    return Permanent("bad_reference_images", f"The reference images are refused: {_one_line(reason)}.")


def toolchain_failed(tool: str, reason: str) -> Permanent:
    return Permanent("toolchain_failed", f"The vendor's {tool[:60]} refused the model: {_one_line(reason)}.")


def tflite_missing() -> Retryable:
    return Retryable(
        "This worker cannot read .tflite: the extra `tflite` is not installed. Another worker may have it.",
        code="toolchain_missing",
    )


def tflite_not_convertible(reason: str) -> Permanent:
    return Permanent("tflite_not_convertible", f"The .tflite model cannot be brought to ONNX: {_one_line(reason)}.")
