"""A conversion's form, from the socket to files on disk: bounded in bytes, parts and time, and never in memory.

The files lie in a directory of the request's own, which goes with it.
"""

from __future__ import annotations

import asyncio
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.types import Message

from api.file_names import clean_file_name
from leasehold.errors import Invalid
from pipelines.conversion.limits import ModelLimits
from pipelines.conversion.pipeline import ConversionParams

LIMITS = ModelLimits()
#: Everything a form may hold, with room for its boundaries and fields.
MOST_BYTES = LIMITS.max_bytes + LIMITS.max_images * LIMITS.max_image_bytes + 1024 * 1024
#: An upload takes at most this long: 500 MB at 150 KB a second.
MOST_SECONDS = 3600.0
_MOST_FIELDS = 20
_MOST_FIELD_BYTES = 4096
_MOST_USER = 128
_FORM = ("model_id", "version", "platform", "enable_evaluate", "enable_sim_fp", "enable_sim_fixed")


class TfLite(Exception):
    """The model is of a kind that this installation does not convert."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A form that is acceptable, its files on disk."""

    params: ConversionParams
    user_id: str
    owner_tenant: str | None
    file_name: str
    model: Path
    references: Path
    images: int


async def receive(request: Request, directory: Path) -> Sent:
    """Read the whole form. Raises Invalid, TfLite, TimeoutError, or Starlette's 400 for what is no form."""
    bounded = Request(request.scope, _Bounded(request))
    async with (
        asyncio.timeout(MOST_SECONDS),
        bounded.form(max_files=LIMITS.max_images + 2, max_fields=_MOST_FIELDS, max_part_size=_MOST_FIELD_BYTES) as form,
    ):
        model, images = _files(form)
        params, user_id = _params(form), _text(form, "user_id")
        if user_id is None:
            raise Invalid("invalid_request", "The form needs a user_id.")
        paths = directory / "model", directory / "references"
        await asyncio.to_thread(_write, model, images, *paths)
        name = clean_file_name(model.filename or "")
        return Sent(params, user_id, _text(form, "tenant_id"), name, *paths, len(images))


class _Bounded:
    """Counts what came, whatever was announced."""

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._left = MOST_BYTES

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise Invalid("too_large", f"A form has at most {MOST_BYTES} bytes.")
        return message


def _files(form: FormData) -> tuple[UploadFile, list[UploadFile]]:
    model = form.get("model")
    if not isinstance(model, UploadFile):
        raise Invalid("model_missing", "The form needs a file named model.")
    name = (model.filename or "").lower()
    if name.endswith(".tflite"):
        raise TfLite
    if not name.endswith(".onnx"):
        raise Invalid("unsupported_format", "The model's file name ends in .onnx.")
    if (model.size or 0) > LIMITS.max_bytes:
        raise Invalid("too_large", f"A model has at most {LIMITS.max_bytes} bytes.")
    images = [part for name in ("ref_images", "ref_images[]") for part in form.getlist(name)]
    files = [part for part in images if isinstance(part, UploadFile)]
    if len(files) != len(images) or len(files) > LIMITS.max_images:
        raise Invalid("bad_reference_images", f"Reference images are files, {LIMITS.max_images} at most.")
    if any((file.size or 0) > LIMITS.max_image_bytes for file in files):
        raise Invalid("bad_reference_images", f"A reference image has at most {LIMITS.max_image_bytes} bytes.")
    return model, files


def _params(form: FormData) -> ConversionParams:
    given: dict[str, Any] = {name: form[name] for name in _FORM if name in form}
    try:
        if str(form.get("enable_sim_hw", "false")).lower() not in {"false", "0", ""}:
            raise Invalid("hardware_simulation_unavailable", "enable_sim_hw needs the vendor's toolchain.")
        return ConversionParams.model_validate(given)
    except ValidationError as error:
        fields = sorted({str(item["loc"][0]) for item in error.errors()})
        raise Invalid("invalid_request", f"Not acceptable: {', '.join(fields)}.") from None


def _text(form: FormData, name: str) -> str | None:
    value = form.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > _MOST_USER or not value.isprintable():
        raise Invalid("invalid_request", f"{name} is text of at most {_MOST_USER} printable characters.")
    return value


def _write(model: UploadFile, images: list[UploadFile], path: Path, references: Path) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(model.file, target, 1024 * 1024)
    references.touch()
    if images:
        with tarfile.open(references, "w") as archive:
            for number, image in enumerate(images):
                member = tarfile.TarInfo(str(number))
                member.size = image.size or 0
                archive.addfile(member, image.file)
