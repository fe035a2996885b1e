"""Reads the form of a new conversion from the socket into the object store, within bounds of bytes, time and memory.

conversion.py calls `receive`, which stores the model in parts, and all reference images in one tar archive. After an
error, the API still reads the rest of the form, because most clients read no answer before they have sent the whole
form. Nothing of a form with an error stays in the store.
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

from leasehold.api.http.callback_urls import MAX_CHARACTERS, check_callback_url
from leasehold.api.http.file_names import clean_file_name
from leasehold.api.http.multipart import Begin, Data, End, events
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Invalid, RequestError, StoreError, Unsupported
from leasehold.domain.tags import check_given_tags
from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.pipeline import ConversionParams, Platform, Toolchain
from leasehold.pipelines.media.kinds import sniff
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.storage.streaming import PART_BYTES, Upload

LIMITS = ModelLimits()
#: The largest form, with room for its boundaries and fields.
MAX_BYTES = LIMITS.max_bytes + LIMITS.max_images * LIMITS.max_image_bytes + 1024 * 1024
#: The largest memory that one form needs. The model and the archive each have two parts in memory: one is filling, and
#: one is being sent to the store. A picture may be in memory twice: in the buffer, and on its way to the archive.
MEMORY_BYTES = 4 * PART_BYTES + 2 * LIMITS.max_image_bytes
#: Seconds that an upload may take: 500 MB at 180 KB a second. Housekeeping (a maintenance loop of the workers) deletes
#: the files of an unfinished upload within the hour.
MAX_SECONDS = 3000.0
_MAX_FIELDS = 20
_MAX_FIELD_BYTES = 4096
_MAX_USER_CHARACTERS = 128
_IMAGE_FIELDS = ("ref_images", "ref_images[]")
_IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/webp"})
_TAR_BLOCK = tarfile.BLOCKSIZE  # a tar archive pads each file to a multiple of this
#: The fields of the form that ConversionParams has under the same names.
_PARAMETER_FIELDS = (
    "model_id",
    "version",
    "platform",
    "enable_evaluate",
    "enable_sim_fp",
    "enable_sim_fixed",
    "enable_sim_hw",
    "accuracy_guard",
)
#: The schema of a field that is true or false.
_FLAG = {"type": "boolean", "default": False}
#: The schema of `user_id` and `tenant_id`: the client's own names for its users and tenants.
_USER = {"type": "string", "pattern": f"^[ -~]{{1,{_MAX_USER_CHARACTERS}}}$"}
#: The parts of the form, for the OpenAPI document.
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
    "tags": {"type": "string", "contentMediaType": "application/json"},
    "callback_url": {"type": "string", "maxLength": MAX_CHARACTERS},
    "enable_evaluate": _FLAG,
    "enable_sim_fp": _FLAG,
    "enable_sim_fixed": _FLAG,
    "enable_sim_hw": _FLAG,
    "accuracy_guard": _FLAG,
}


@dataclass(frozen=True, slots=True)
class StoredForm:
    """An accepted form. Its files are in the store."""

    params: ConversionParams
    user_id: str
    owner_tenant: str | None  # the form's `tenant_id`: a tenant of the client
    file_name: str
    model_bytes: int
    image_count: int
    image_bytes: int  # the size of the archive that has all images
    tags: dict[str, str]
    callback_url: str | None
    fingerprint: bytes  # a hash of all fields and files, which is equal if a request is repeated


def prefix_of(job_id: UUID) -> str:
    return f"jobs/{job_id}/input/"


def keys_of(job_id: UUID) -> dict[str, str]:
    """The store's keys of a job's inputs. The API chooses them, never the client."""
    return {"model": f"{prefix_of(job_id)}model", "references": f"{prefix_of(job_id)}references.tar"}


async def receive(request: Request, store: ObjectStore, keys: dict[str, str], settings: Settings) -> StoredForm:
    """Read and store the whole form.

    Raises Invalid, Unsupported, BodyTooSlow for a silent client, TimeoutError after MAX_SECONDS, StoreError, and
    HTTPException(400) for a malformed form. After an error, the stored files are deleted, if the store answers.
    """
    async with (
        asyncio.timeout(MAX_SECONDS),
        store.upload(keys["model"]) as model,
        store.upload(keys["references"]) as references,
    ):
        form = _Form(model, references, settings)
        async for event in events(request, MAX_BYTES):
            await form.handle(event)
        return await form.finish()


class _Form:
    """Handles the parts as they arrive. A part with a file name is a file; any other part is a field. After the first
    error the form ignores all further parts, and `finish` raises this error.
    """

    def __init__(self, model: Upload, references: Upload, settings: Settings) -> None:
        self._model = model
        self._references = references
        self._settings = settings
        self._toolchain = settings.conversion_toolchain
        # The vendor's toolchain (`kneron`) reads .tflite itself.
        self._accepts_tflite = settings.conversion_tflite or self._toolchain == "kneron"
        self._fields: dict[str, str] = {}
        self._file_name: str | None = None
        self._image_count = 0
        self._part = Begin("", None)  # the part that is arriving
        self._buffer = bytearray()  # the bytes of this part, if it is a field or a picture
        self._error: RequestError | StoreError | None = None

    async def handle(self, event: Begin | Data | End) -> None:
        if self._error is not None:
            return
        try:
            match event:
                case Begin():
                    self._begin_part(event)
                case Data(piece):
                    await self._receive_piece(piece)
                case End():
                    await self._end_part()
        except (RequestError, StoreError) as error:
            self._error = error
            self._buffer.clear()

    def _begin_part(self, part: Begin) -> None:
        self._part = part
        self._buffer.clear()
        if part.file_name is None:
            if len(self._fields) >= _MAX_FIELDS:
                raise Invalid("invalid_request", f"A form has at most {_MAX_FIELDS} fields.")
        elif part.name == "model":
            if self._file_name is not None:
                raise Invalid("invalid_request", "A form has one model.")
            self._file_name = part.file_name
            _check_file_name(part.file_name, accepts_tflite=self._accepts_tflite)
        elif part.name not in _IMAGE_FIELDS:
            raise Invalid("invalid_request", "A form's files are named model and ref_images[].")
        elif self._image_count >= LIMITS.max_images:
            raise Invalid("bad_reference_images", f"There are at most {LIMITS.max_images} reference images.")

    async def _receive_piece(self, piece: bytes) -> None:
        if self._part.file_name is not None and self._part.name == "model":
            if self._model.size + len(piece) > LIMITS.max_bytes:
                raise Invalid("too_large", f"A model has at most {LIMITS.max_bytes} bytes.")
            await self._model.write(piece)
            return
        self._buffer += piece
        if self._part.file_name is None and len(self._buffer) > _MAX_FIELD_BYTES:
            raise Invalid("invalid_request", f"A field has at most {_MAX_FIELD_BYTES} bytes.")
        if len(self._buffer) > LIMITS.max_image_bytes:
            raise Invalid("bad_reference_images", f"A reference image has at most {LIMITS.max_image_bytes} bytes.")

    async def _end_part(self) -> None:
        if self._part.file_name is None:
            self._fields[self._part.name] = self._buffer.decode("utf-8", "replace")
        elif self._part.name in _IMAGE_FIELDS and (self._part.file_name or self._buffer):
            # (A part with an empty file name and without a byte is no image. A browser sends it if the person chose no
            # file.)
            await self._store_image()

    async def _store_image(self) -> None:
        if sniff(bytes(self._buffer[:64])) not in _IMAGE_TYPES and not self._buffer.startswith(b"BM"):  # BM: a BMP
            raise Invalid(
                "bad_reference_images", f"File {self._image_count + 1} is not a JPEG, PNG, WebP or BMP picture."
            )
        member = tarfile.TarInfo(f"{self._image_count:03}")
        member.size = len(self._buffer)
        await self._references.write(member.tobuf())
        await self._references.write(bytes(self._buffer) + bytes(-len(self._buffer) % _TAR_BLOCK))
        self._image_count += 1

    async def finish(self) -> StoredForm:
        """Complete both uploads. Raises the first error of the form."""
        if self._error is not None:
            raise self._error
        if self._file_name is None:
            raise Invalid("model_missing", "The form needs a file named model.")
        params, user_id = _params_of(self._fields, self._toolchain), _text_of(self._fields, "user_id")
        if user_id is None:
            raise Invalid("invalid_request", "The form needs a user_id.")
        owner_tenant, tags = _text_of(self._fields, "tenant_id"), _tags_of(self._fields)
        callback_url = _callback_url_of(self._fields, self._settings)
        if self._image_count:
            await self._references.write(bytes(2 * _TAR_BLOCK))  # the end of a tar archive
        model, references = await self._model.finish(), await self._references.finish()
        # A form without tags, or without a callback URL, has the same fingerprint as in releases that did not have
        # these fields. So a request that is repeated after an upgrade gets its first answer.
        fingerprinted_texts = [
            params.model_dump_json(),
            user_id,
            owner_tenant or "",
            self._file_name,
            model.sha256,
            references.sha256,
            *([orjson.dumps(tags, option=orjson.OPT_SORT_KEYS).decode()] if tags else ()),
            *(["callback_url", callback_url] if callback_url else ()),
        ]
        return StoredForm(
            params,
            user_id,
            owner_tenant,
            clean_file_name(self._file_name),
            model.size,
            self._image_count,
            references.size,
            tags,
            callback_url,
            fingerprint(b"POST /api/v1/jobs", *(text.encode() for text in fingerprinted_texts)),
        )


def _check_file_name(file_name: str, *, accepts_tflite: bool) -> None:
    name = file_name.lower()
    if name.endswith(".tflite"):
        if not accepts_tflite:
            raise Unsupported(
                "tflite_unsupported",
                "This installation converts .onnx models. For .tflite its workers need leasehold[tflite], and its API"
                " needs LEASEHOLD_CONVERSION_TFLITE=true. Or convert the model to ONNX before you send it.",
            )
    elif not name.endswith(".onnx"):
        raise Invalid("unsupported_format", "The model's file name ends in .onnx.")


def _tags_of(fields: dict[str, str]) -> dict[str, str]:
    try:
        tags = orjson.loads(fields.get("tags") or b"{}")
    except ValueError:
        tags = None
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise Invalid("invalid_tags", "The field tags is a JSON object of texts.")
    return dict(check_given_tags(tags))


def _callback_url_of(fields: dict[str, str], settings: Settings) -> str | None:
    url = fields.get("callback_url") or None
    if url is not None and len(url) > MAX_CHARACTERS:
        raise Invalid("invalid_request", f"callback_url has at most {MAX_CHARACTERS} characters.")
    check_callback_url(settings, url)
    return url


def _params_of(fields: dict[str, str], toolchain: Toolchain) -> ConversionParams:
    values: dict[str, Any] = {name: fields[name] for name in _PARAMETER_FIELDS if name in fields}
    try:
        if "preprocessing" in fields:
            values["preprocessing"] = orjson.loads(fields["preprocessing"])
        params = ConversionParams.model_validate(values | {"toolchain": toolchain})
    except ValidationError as error:
        field_names = sorted({str(item["loc"][0]) for item in error.errors()})
        raise Invalid("invalid_request", f"Not acceptable: {', '.join(field_names)}.") from None
    except orjson.JSONDecodeError:
        raise Invalid("invalid_request", "Not acceptable: preprocessing is not JSON.") from None
    if params.enable_sim_hw and toolchain != "kneron":
        raise Invalid("hardware_simulation_unavailable", "enable_sim_hw needs the vendor's toolchain.")
    if params.accuracy_guard and toolchain == "kneron":
        raise Invalid("invalid_request", "accuracy_guard needs the open toolchain.")
    return params


def _text_of(fields: dict[str, str], name: str) -> str | None:
    value = fields.get(name)
    if not value:
        return None
    if len(value) > _MAX_USER_CHARACTERS or not value.isprintable():
        raise Invalid("invalid_request", f"{name} is text of at most {_MAX_USER_CHARACTERS} printable characters.")
    return value
