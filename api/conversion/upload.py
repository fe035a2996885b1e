"""Reads a conversion's form from the socket into the object store: bounded in bytes, parts, time and memory.

The model goes to its key in parts. Reference images go into one archive, each once it is complete. A form with an
error is read to its end, so that its client sees the answer; nothing of it is stored.
"""

from __future__ import annotations

import asyncio
import tarfile
from dataclasses import dataclass
from typing import Any, get_args
from uuid import UUID

import orjson
from pydantic import ValidationError
from starlette.requests import Request

from leasehold.api.http.file_names import clean_file_name
from leasehold.api.http.multipart import Begin, Data, End, events
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Invalid, RequestError, StoreError, Unsupported
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.pipeline import ConversionParams, Platform, Toolchain
from leasehold.pipelines.media.kinds import sniff
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.storage.streaming import PART_BYTES, Upload

LIMITS = ModelLimits()
#: The most bytes of a form, with room for its boundaries and fields.
MAX_BYTES = LIMITS.max_bytes + LIMITS.max_images * LIMITS.max_image_bytes + 1024 * 1024
#: Memory of one form: for each of its two objects a part that fills and a part being sent, and a picture.
MEMORY_BYTES = 4 * PART_BYTES + 2 * LIMITS.max_image_bytes
#: An upload may take this long: 500 MB at 180 KB a second. Unfinished uploads are deleted within the hour.
MAX_SECONDS = 3000.0
_MAX_FIELDS = 20
_MAX_FIELD_BYTES = 4096
_MAX_USER = 128
_IMAGES = ("ref_images", "ref_images[]")
_KINDS = frozenset({"image/jpeg", "image/png", "image/webp"})
_BLOCK = tarfile.BLOCKSIZE
_FIELDS = ("model_id", "version", "platform", "enable_evaluate", "enable_sim_fp", "enable_sim_fixed", "enable_sim_hw")
#: The form's parts, for the document.
_FLAG = {"type": "boolean", "default": False}
_USER = {"type": "string", "pattern": f"^[ -~]{{1,{_MAX_USER}}}$"}
FORM: dict[str, Any] = {
    "model": {
        "type": "string",
        "format": "binary",
        "description": "A file named *.onnx or, if the installation accepts it, *.tflite.",
    },
    "ref_images[]": {"type": "array", "items": {"type": "string", "format": "binary"}, "maxItems": LIMITS.max_images},
    "user_id": _USER,
    "tenant_id": _USER,
    "model_id": {"type": "integer", "minimum": 1, "maximum": 65_535},
    "version": {"type": "string", "pattern": "^[0-9a-fA-F]{4}$"},
    "platform": {"type": "string", "enum": list(get_args(Platform))},
    "preprocessing": {"type": "string", "contentMediaType": "application/json"},
    "enable_evaluate": _FLAG,
    "enable_sim_fp": _FLAG,
    "enable_sim_fixed": _FLAG,
    "enable_sim_hw": _FLAG,
}


@dataclass(frozen=True, slots=True)
class Sent:
    """A form that was accepted. Its files are in the store."""

    params: ConversionParams
    user_id: str
    owner_tenant: str | None
    file_name: str
    model_bytes: int
    images: int
    fingerprint: bytes  # of everything that was sent


def prefix_of(job_id: UUID) -> str:
    return f"jobs/{job_id}/input/"


def keys_of(job_id: UUID) -> dict[str, str]:
    """The keys of a job's inputs. The API chooses them, never the client."""
    return {"model": f"{prefix_of(job_id)}model", "references": f"{prefix_of(job_id)}references.tar"}


async def receive(request: Request, store: ObjectStore, keys: dict[str, str], settings: Settings) -> Sent:
    """Read and store the whole form.

    Raises Invalid, Unsupported, TimeoutError, StoreError, or a 400 for a malformed form. Then nothing is stored, except
    what could not be deleted because the store is down.
    """
    async with (
        asyncio.timeout(MAX_SECONDS),
        store.upload(keys["model"]) as model,
        store.upload(keys["references"]) as references,
    ):
        form = _Form(model, references, settings)
        async for event in events(request, MAX_BYTES):
            await form.take(event)
        return await form.finish()


class _Form:
    """Handles the parts as they arrive. Remembers the first error; `finish` raises it."""

    def __init__(self, model: Upload, references: Upload, settings: Settings) -> None:
        self._model = model
        self._references = references
        self._toolchain = settings.conversion_toolchain
        self._takes_tflite = settings.conversion_tflite or self._toolchain == "kneron"
        self._fields: dict[str, str] = {}
        self._file_name: str | None = None
        self._images = 0
        self._part = Begin("", None)
        self._held = bytearray()  # the field or picture that is being read
        self._refused: RequestError | StoreError | None = None

    async def take(self, event: Begin | Data | End) -> None:
        if self._refused is not None:
            return
        try:
            match event:
                case Begin():
                    self._begin(event)
                case Data(piece):
                    await self._data(piece)
                case End():
                    await self._end()
        except (RequestError, StoreError) as error:
            self._refused = error
            self._held.clear()

    def _begin(self, part: Begin) -> None:
        self._part = part
        self._held.clear()
        if part.file_name is None:
            if len(self._fields) >= _MAX_FIELDS:
                raise Invalid("invalid_request", f"A form has at most {_MAX_FIELDS} fields.")
        elif part.name == "model":
            if self._file_name is not None:
                raise Invalid("invalid_request", "A form has one model.")
            self._file_name = part.file_name
            _check_kind(part.file_name, takes_tflite=self._takes_tflite)
        elif part.name not in _IMAGES:
            raise Invalid("invalid_request", "A form's files are named model and ref_images[].")
        elif self._images >= LIMITS.max_images:
            raise Invalid("bad_reference_images", f"There are at most {LIMITS.max_images} reference images.")

    async def _data(self, piece: bytes) -> None:
        if self._part.file_name is not None and self._part.name == "model":
            if self._model.size + len(piece) > LIMITS.max_bytes:
                raise Invalid("too_large", f"A model has at most {LIMITS.max_bytes} bytes.")
            await self._model.write(piece)
            return
        self._held += piece
        if self._part.file_name is None and len(self._held) > _MAX_FIELD_BYTES:
            raise Invalid("invalid_request", f"A field has at most {_MAX_FIELD_BYTES} bytes.")
        if len(self._held) > LIMITS.max_image_bytes:
            raise Invalid("bad_reference_images", f"A reference image has at most {LIMITS.max_image_bytes} bytes.")

    async def _end(self) -> None:
        if self._part.file_name is None:
            self._fields[self._part.name] = self._held.decode("utf-8", "replace")
        elif self._part.name in _IMAGES:
            await self._keep_image()

    async def _keep_image(self) -> None:
        if sniff(bytes(self._held[:64])) not in _KINDS and not self._held.startswith(b"BM"):
            raise Invalid("bad_reference_images", f"File {self._images + 1} is not a JPEG, PNG, WebP or BMP picture.")
        member = tarfile.TarInfo(f"{self._images:03}")
        member.size = len(self._held)
        await self._references.write(member.tobuf())
        await self._references.write(bytes(self._held) + bytes(-len(self._held) % _BLOCK))
        self._images += 1

    async def finish(self) -> Sent:
        if self._refused is not None:
            raise self._refused
        if self._file_name is None:
            raise Invalid("model_missing", "The form needs a file named model.")
        params, user_id = _params(self._fields, self._toolchain), _text(self._fields, "user_id")
        if user_id is None:
            raise Invalid("invalid_request", "The form needs a user_id.")
        owner_tenant = _text(self._fields, "tenant_id")
        if self._images:
            await self._references.write(bytes(2 * _BLOCK))
        model, references = await self._model.finish(), await self._references.finish()
        said = [params.model_dump_json(), user_id, owner_tenant or "", self._file_name, model.sha256, references.sha256]
        return Sent(
            params,
            user_id,
            owner_tenant,
            clean_file_name(self._file_name),
            model.size,
            self._images,
            fingerprint(b"POST /api/v1/jobs", *(part.encode() for part in said)),
        )


def _check_kind(file_name: str, *, takes_tflite: bool) -> None:
    name = file_name.lower()
    if name.endswith(".tflite"):
        if not takes_tflite:
            raise Unsupported(
                "tflite_unsupported",
                "This installation converts .onnx models. For .tflite its workers need leasehold[tflite], and the API"
                " LEASEHOLD_CONVERSION_TFLITE=true; or bring the model to ONNX first.",
            )
    elif not name.endswith(".onnx"):
        raise Invalid("unsupported_format", "The model's file name ends in .onnx.")


def _params(fields: dict[str, str], toolchain: Toolchain) -> ConversionParams:
    given: dict[str, Any] = {name: fields[name] for name in _FIELDS if name in fields}
    try:
        if "preprocessing" in fields:
            given["preprocessing"] = orjson.loads(fields["preprocessing"])
        params = ConversionParams.model_validate(given | {"toolchain": toolchain})
    except ValidationError as error:
        places = sorted({str(item["loc"][0]) for item in error.errors()})
        raise Invalid("invalid_request", f"Not acceptable: {', '.join(places)}.") from None
    except orjson.JSONDecodeError:
        raise Invalid("invalid_request", "Not acceptable: preprocessing is not JSON.") from None
    if params.enable_sim_hw and toolchain != "kneron":
        raise Invalid("hardware_simulation_unavailable", "enable_sim_hw needs the vendor's toolchain.")
    return params


def _text(fields: dict[str, str], name: str) -> str | None:
    value = fields.get(name)
    if not value:
        return None
    if len(value) > _MAX_USER or not value.isprintable():
        raise Invalid("invalid_request", f"{name} is text of at most {_MAX_USER} printable characters.")
    return value
