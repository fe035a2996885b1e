"""A TensorFlow Lite model goes the way of the others, and one that cannot be read is refused without harm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from leasehold.domain.errors import Permanent
from leasehold.pipelines.conversion import nef
from leasehold.pipelines.conversion.toolchain.running import Runnable
from tests.conversion.conftest import Bench
from tests.conversion.models import network, pictures, saved
from tests.conversion.tflite_model import convolution


async def test_a_tflite_model_goes_through_all_three_steps_inside_the_sandbox(bench: Bench) -> None:
    directory = bench.directory()
    model = directory / "model"
    model.write_bytes(convolution())
    made = await bench.convert(model, pictures(directory / "references", 4))
    packed = Runnable(nef.read(made["output/out.nef"]).part("model.onnx"))
    given = packed.random_input(np.random.default_rng(3))
    assert [value.shape for value in given.values()] == [(1, 3, 8, 8)]
    (answer,) = packed.run(given).values()
    assert answer.shape == (1, 4, 8, 8)
    assert (answer >= 0).all()  # its ReLU


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: model[:200],
        lambda model: model[:8] + b"\xff" * 400,
        lambda model: model.replace(b"\x01\x00\x00\x00\x03\x00\x00\x00", b"\x01\x00\x00\x00\x7f\x00\x00\x00"),
        lambda _model: b"\x00\x00\x00\x00TFL3",
    ],
)
async def test_a_damaged_tflite_model_gets_a_code(bench: Bench, spoil: Callable[[bytes], bytes]) -> None:
    model = bench.directory() / "model"
    model.write_bytes(spoil(convolution()))
    with pytest.raises(Permanent) as refused:
        await bench.run("onnx", {"model": model})
    assert refused.value.code in {"tflite_not_convertible", "not_onnx", "invalid_model", "missing_shapes"}
    await bench.run("onnx", {"model": saved(network(), model)})
