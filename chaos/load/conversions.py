"""A client that submits conversions, and cancels some of them while they run."""

from __future__ import annotations

import asyncio
from itertools import count

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from chaos.load.diary import Diary, Sender

#: The client cancels every fourth conversion.
_CANCEL_EVERY = 4


def model() -> bytes:
    """A picture classifier of one convolution: a kilobyte."""
    rng = np.random.default_rng(1)
    weights = {"w1": rng.standard_normal((4, 3, 3, 3)), "w2": rng.standard_normal((4, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "chaos",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )  # fmt: skip
    onnx_model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx_model.SerializeToString()


def sender(diary: Diary) -> Sender:
    """Submits conversions. The request's key is also the user: a user may have only one unfinished conversion."""
    content, numbers = model(), count()

    async def send(tenant: str) -> None:
        client, key = diary.client(tenant), diary.key()
        cancels = next(numbers) % _CANCEL_EVERY == 0
        form = {"user_id": key, "model_id": "40000", "version": "0001", "platform": "720"}
        outcome = await client.request(
            "POST", "/api/v1/jobs", key=key, again=diary.is_sent_twice(),
            data=form, files={"model": ("model.onnx", content, "application/octet-stream")},
        )  # fmt: skip
        jobs = tuple((str(body["job_id"]),) for body in outcome.answered)
        job = jobs[-1][0] if jobs else ""
        diary.record("conversion", tenant, key, outcome, job=job, endpoint="POST /api/v1/jobs", answers=jobs)
        if not job or not cancels:
            return
        await asyncio.sleep(diary.rng.uniform(0.0, 2.0))
        outcome = await client.request("POST", f"/api/v1/jobs/{job}/cancel")
        answer = ""
        if outcome.good:
            answer = "accepted" if outcome.body["status"] == "cancelled" else "stopping"
        diary.record(
            "cancel", tenant, f"cancel {job}", outcome, job=job, endpoint="POST /api/v1/jobs/cancel", answer=answer
        )

    return send
