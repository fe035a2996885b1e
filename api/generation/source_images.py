"""POST /v1/upload/images: store source images of generations, and answer URLs from which providers fetch them."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime, timedelta
from http import HTTPStatus
from time import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import GENERATION_WRITE, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.early import refuse_early
from leasehold.api.http.multipart import Begin, Data, End, events
from leasehold.api.http.openapi import multipart, problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.domain.errors import BadGateway, BodyTooSlow, Invalid, RequestError, StoreError
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.media.kinds import sniff

router = APIRouter(tags=["generation"], route_class=CallerFirst)
Writer = Annotated[Caller, Depends(Require(GENERATION_WRITE))]

PATH = "/v1/upload/images"
#: Images of one request.
MAX_IMAGES = 10
_MAX_SECONDS = 300.0
_EXTENSIONS = {"image/jpeg": "jpg", "image/png": "png", "image/webp": "webp"}


@router.post(
    PATH,
    operation_id="uploadSourceImages",
    summary="Upload source images",
    description="A multipart form of one to ten files, JPEG, PNG or WebP. Their URLs work until `expires_at`.",
    openapi_extra=multipart(
        {"image": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1, "maxItems": 10}},
        ["image"],
    ),
    responses=problems({
        HTTPStatus.BAD_REQUEST: "`bad_request`: the form is malformed",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`image_missing`, `too_many_images`, `too_large`, `unsupported_format`",
        HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`, `storage_full`",
        HTTPStatus.BAD_GATEWAY: "`store_unavailable`",
        HTTPStatus.SERVICE_UNAVAILABLE: "`busy`",
    }),
)  # fmt: skip
async def upload_images(request: Request, caller: Writer) -> Response:
    services = services_of(request)
    services.store.require()
    kept = services.settings.generation_keep_seconds
    try:
        # An image is held whole, and once more while it is stored.
        held = 2 * services.settings.generation_source_max_bytes
        async with services.bodies.room(caller.tenant_id, held), asyncio.timeout(_MAX_SECONDS):
            await refuse_early(services, caller, {}, what="uploads")
            form = _Form(services, caller)
            keys = await form.read(request)
    except TimeoutError:
        raise BodyTooSlow("body_too_slow", "The form did not arrive in time.") from None
    except StoreError as error:
        raise BadGateway("store_unavailable", "The image could not be stored. Try again soon.") from error
    urls = [await services.store.sign_get(key, seconds=kept) for key in keys]
    said: dict[str, Any] = {
        "created": int(time()),
        "data": [{"url": url} for url in urls],
        "expires_at": int(time()) + kept,
    }
    return json_response(said, HTTPStatus.OK, form.limited)


class _Form:
    """Reads one image at a time into memory and stores it. The first error is raised at the end of the form: a client
    that still sends would not see an earlier answer.
    """

    def __init__(self, services: Services, caller: Caller) -> None:
        self.limited: dict[str, str] = {}
        self._services = services
        self._caller = caller
        self._at_most = services.settings.generation_source_max_bytes
        self._held = bytearray()
        self._is_file = False
        self._keys: list[str] = []
        self._fresh: dict[str, datetime] = {}  # stored by this form; kept until then
        self._refused: RequestError | StoreError | None = None

    async def read(self, request: Request) -> list[str]:
        try:
            return await self._read(request)
        except BaseException:
            await asyncio.shield(self._drop())
            raise

    async def _drop(self) -> None:
        """Leave what a refused form has stored to the next housekeeping: no client knows of it."""
        if self._fresh:
            async with self._services.pool.acquire() as connection:
                await generations.drop_sources(connection, self._caller.tenant_id, self._fresh)

    async def _read(self, request: Request) -> list[str]:
        async for event in events(request, MAX_IMAGES * self._at_most + 1024 * 1024):
            if self._refused is None:
                try:
                    await self._take(event)
                except (RequestError, StoreError) as error:
                    self._refused = error
                    self._held.clear()
        if self._refused is not None:
            raise self._refused
        if not self._keys:
            raise Invalid("image_missing", "The form has no file.")
        return self._keys

    async def _take(self, event: Begin | Data | End) -> None:
        match event:
            case Begin(file_name=name):
                self._is_file = name is not None
                if self._is_file and len(self._keys) >= MAX_IMAGES:
                    raise Invalid("too_many_images", f"A form has at most {MAX_IMAGES} images.")
            case Data(piece):
                self._held += piece
                if len(self._held) > self._at_most:
                    raise Invalid("too_large", f"An image has at most {self._at_most} bytes.")
            case End():
                if self._is_file:
                    self._keys.append(await self._store(bytes(self._held)))
                self._held.clear()

    async def _store(self, image: bytes) -> str:
        kind = sniff(image[:64])
        if kind not in _EXTENSIONS:
            raise Invalid("unsupported_format", "A source image is a JPEG, PNG or WebP.")
        name = f"{hashlib.sha256(image).hexdigest()}.{_EXTENSIONS[kind]}"
        tenant_id = self._caller.tenant_id
        owner = hashlib.sha256(tenant_id.encode()).hexdigest()[:16]  # not every tenant's name is a valid part of a key
        key = f"sources/{owner}/{name}"
        async with self._services.pool.acquire() as connection, connection.transaction():
            self.limited = await self._services.admission.uploading(connection, self._caller.payer)
            # The row first: an object without one would never be deleted.
            kept = timedelta(seconds=self._services.settings.generation_keep_seconds)
            until = await generations.keep_source(connection, tenant_id, key, kept)
        if until is not None:
            self._fresh[key] = until
        await self._services.store.put(key, image, content_type=kind, metadata={})
        return key
