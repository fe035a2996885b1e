"""Declares the conversion pipeline, which turns an ONNX model into an optimised, an int8 and a packaged model.

The API and the workers import this module, so it imports no heavy library. The inputs are `model` (an .onnx file) and
`references` (a tar archive of the reference images, or an empty file if there are no images). Each step has the name of
the model that it writes: `onnx` (optimised), `bie` (int8) and `nef` (packaged). The last two names are the chip
vendor's. Every step also writes a report.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from leasehold.domain.kind import Kind, NamedObjects, Scopes
from leasehold.domain.pipeline import MIB, Limits, Pipeline, RunTerms, Step
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.signing import sign_package

#: The number of the vendor's chip.
Platform: TypeAlias = Literal["520", "720", "530", "630", "730"]
#: `open` runs on every worker. `kneron` runs only on a worker with the vendor's package `ktc`.
Toolchain: TypeAlias = Literal["open", "kneron"]
#: The prefix of the backups of objects that promotions replace, in the installation's store. The key of a backup is
#: `promotions/CALL/NUMBER`, where CALL is the id of the promote call.
BACKUPS = "promotions/"
#: What the child process of a step may use.
_LIMITS = Limits(memory_bytes=4096 * MIB, cpu_seconds=1800, file_bytes=1024 * MIB)
_TIMEOUT = timedelta(minutes=30)


# Within these bounds, no pixel becomes infinite or NaN in float32.
_Mean = Annotated[float, Field(ge=0, le=1)]
_Scale = Annotated[float, Field(ge=1e-6, le=1e6)]


class Preprocessing(BaseModel):
    """How a picture becomes an input: RGB scaled to the input's size, then (pixel / 255 - mean) / scale."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: tuple[_Mean, _Mean, _Mean] = Field(default=(0.5, 0.5, 0.5), description="Per channel, of 0 to 1.")
    scale: tuple[_Scale, _Scale, _Scale] = Field(
        default=(0.5, 0.5, 0.5), description="Per channel, of 0.000001 to 1000000."
    )
    layout: Literal["NCHW", "NHWC"] = Field(default="NCHW", description="The order of the input's dimensions.")


class ConversionParams(BaseModel):
    """The parameters of a conversion. `enable_evaluate`, `enable_sim_*`: whether the reports contain an evaluation of
    the model, and its simulations in float (`fp`), in fixed point or on the hardware (`hw`). `accuracy_guard`: whether
    layers stay float if the int8 model would otherwise lose more than one percentage point of top-1 agreement. `seed`:
    the seed of all generated data, because the same model must give the same bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_id: int = Field(ge=1, le=65535)
    version: str = Field(pattern=r"^[0-9a-fA-F]{4}$", description="Four hexadecimal digits.")
    platform: Platform
    opset: int = Field(
        default=17, ge=13, le=21, description="The opset of the optimised model: per-channel int8 needs 13."
    )
    enable_evaluate: bool = False
    enable_sim_fp: bool = False
    enable_sim_fixed: bool = False
    enable_sim_hw: bool = Field(default=False, description="Only with the vendor's toolchain.")
    accuracy_guard: bool = Field(default=False, description="Only with the open toolchain.")
    toolchain: Toolchain = "open"
    preprocessing: Preprocessing = Preprocessing()
    limits: ModelLimits = ModelLimits()
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_serializer(mode="wrap")
    def _without_new_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `accuracy_guard` if it is false, for two reasons. Workers of earlier releases refuse an unknown
        parameter. A request that is repeated after an upgrade must have the same fingerprint as before the upgrade.
        """
        values: dict[str, Any] = handler(self)
        if not self.accuracy_guard:
            values.pop("accuracy_guard", None)
        return values


conversion = Pipeline(
    "conversion",
    params=ConversionParams,
    inputs=("model", "references"),
    module="leasehold.pipelines.conversion.steps",
    terms=RunTerms(title="Model conversion", offered=False),
    preload=("onnxslim",),
    steps=[
        Step(
            "onnx", reads=("model",), writes="output/out.onnx", queue="conversion", isolated=True,
            limits=_LIMITS, timeout=_TIMEOUT, max_attempts=3, version=3,
        ),
        Step(
            "bie", needs=("onnx",), reads=("onnx", "references"), writes="output/out.bie", queue="conversion",
            isolated=True, limits=_LIMITS, timeout=_TIMEOUT, max_attempts=3, version=7,
        ),
        Step(
            "nef", needs=("bie",), reads=("bie", "references"), writes="output/out.nef", queue="conversion",
            isolated=True, limits=_LIMITS, timeout=_TIMEOUT, max_attempts=3, version=3,
        ),
    ],
)  # fmt: skip

# The worker itself signs, after the step and outside the sandbox, because the child process must not see the key.
conversion.finishes("nef", sign_package)

CONVERSION = Kind(
    "conversion",
    pipelines=(conversion,),
    routers=(
        "leasehold.api.conversion.conversion:router",
        "leasehold.api.conversion.events:router",
        "leasehold.api.conversion.result:router",
        "leasehold.api.conversion.promote:router",
    ),
    # Earlier releases did not record the bytes of reference images.
    stored="SELECT coalesce(sum((input ->> 'size_bytes')::bigint"
    " + coalesce((input ->> 'ref_images_bytes')::bigint, 0)), 0) FROM conversion WHERE tenant_id = $1",
    # For `leasehold doctor --reconcile`. promotion/copying.py writes these objects. The backup of a key is needed only
    # while a promote call is writing this key, which the column `turn` shows.
    objects=NamedObjects(
        prefix=BACKUPS,
        pattern=BACKUPS + r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[0-9]+",
        owners="SELECT backup AS id FROM promoted_object WHERE turn IS NOT NULL AND backup = ANY($1::text[])",
        keys="SELECT backup AS id, backup AS key FROM promoted_object"
        " WHERE turn IS NOT NULL AND backup > $1 AND reached = 'replaced' ORDER BY backup LIMIT $2",
    ),
    housekeeping="leasehold.pipelines.conversion.housekeeping:housekeeping",
    scopes=Scopes(read="conversion:read", write="conversion:write"),
    # /v1/jobs does not link to outputs. Only GET /api/v1/jobs/{id}/result serves outputs, because it counts downloads.
    signed_links=False,
)
