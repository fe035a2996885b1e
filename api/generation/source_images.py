"""POST /v1/upload/images: stores source images of generations. The answer has the URLs from which providers fetch
them.
"""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime, timedelta
from http import HTTPStatus
from time import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import GENERATION_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.early import refuse_early
from leasehold.api.http.multipart import Begin, Data, End, events, form_too_slow
from leasehold.api.http.openapi import multipart, problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.best_effort import best_effort
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.domain.errors import BadGateway, Invalid, RequestError, StoreError
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.media.kinds import sniff
from leasehold.storage.signing import MAX_URL_SECONDS

router = APIRouter(tags=["generation"], route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require(GENERATION_WRITE))]

PATH = "/v1/upload/images"
#: The largest number of images in one request.
MAX_IMAGES = 10
#: Seconds that the whole request may take.
_UPLOAD_SECONDS = 300.0
_EXTENSIONS = {"image/jpeg": "jpg", "image/png": "png", "image/webp": "webp"}  # of the keys


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
        HTTPStatus.UNPROCESSABLE_ENTITY: "`image_missing`, `too_many_images`, `too_large`, `unsupported_format`, "
        "`batch_too_large`: an image is larger than all bytes that the tenant may store",
        HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`, `storage_full`",
        HTTPStatus.BAD_GATEWAY: "`store_unavailable`",
        HTTPStatus.SERVICE_UNAVAILABLE: "`busy`",
    }),
)  # fmt: skip
async def upload_images(request: Request, caller: Writer) -> Response:
    services = services_of(request)
    services.store.require()  # raises StoreAbsent if the installation has no store
    try:
        # One image is in memory at a time, and has a second copy while it is being stored.
        memory_bytes = 2 * services.settings.generation_source_max_bytes
        async with services.bodies.room(caller.tenant_id, memory_bytes), asyncio.timeout(_UPLOAD_SECONDS) as time_limit:
            await refuse_early(services, caller, {}, charged_as="uploads")  # an upload waits in no queue
            form = _Form(services, caller)
            keys = await form.read(request)
    except TimeoutError:
        if not time_limit.expired():  # the database was too slow, and not the client
            raise
        raise form_too_slow() from None
    except StoreError as error:
        raise BadGateway("store_unavailable", "The image could not be stored. Try again soon.") from error
    created = int(time())
    url_seconds = min(services.settings.generation_keep_seconds, MAX_URL_SECONDS)
    answer: dict[str, Any] = {
        "created": created,
        "data": [{"url": services.store.sign_get(key, seconds=url_seconds)} for key in keys],
        "expires_at": created + url_seconds,
    }
    return json_response(answer, HTTPStatus.OK, form.limit_fields)


class _Form:
    """Reads one image at a time into memory and stores it. The first error is raised at the end of the form, because a
    client that is still sending would not read an earlier answer.
    """

    def __init__(self, services: Services, caller: Caller) -> None:
        self.limit_fields: dict[str, str] = {}  # the RateLimit headers of the answer
        self._services = services
        self._caller = caller
        self._max_bytes = services.settings.generation_source_max_bytes
        self._buffer = bytearray()  # the bytes of the image that is arriving
        self._is_file = False  # whether the part that is arriving is a file
        self._is_named = False  # whether this file has a name
        self._keys: list[str] = []  # of all images of the form, in order
        self._new_keys: dict[str, datetime] = {}  # the keys of images that were not stored before, and when they expire
        self._error: RequestError | StoreError | None = None  # the first error

    async def read(self, request: Request) -> list[str]:
        """Read and store the whole form. Returns the keys of its images."""
        try:
            return await self._read(request)
        except BaseException:
            await asyncio.shield(self._expire_new_keys())
            raise

    async def _expire_new_keys(self) -> None:
        """Expire the new images of a refused form, so that the next housekeeping (a maintenance loop of the workers)
        deletes them. If PostgreSQL does not answer, the images expire at the end of their normal lifetime.
        """
        if self._new_keys:
            with best_effort("deletions of refused forms"):
                async with self._services.pool.acquire() as connection:
                    await generations.drop_sources(connection, self._caller.tenant_id, self._new_keys)

    async def _read(self, request: Request) -> list[str]:
        async for event in events(request, MAX_IMAGES * self._max_bytes + 1024 * 1024):
            if self._error is None:
                try:
                    await self._handle(event)
                except (RequestError, StoreError) as error:
                    self._error = error
                    self._buffer.clear()
        if self._error is not None:
            raise self._error
        if not self._keys:
            raise Invalid("image_missing", "The form has no file.")
        return self._keys

    async def _handle(self, event: Begin | Data | End) -> None:
        match event:
            case Begin(file_name=name):
                self._is_file, self._is_named = name is not None, bool(name)
                if self._is_file and len(self._keys) >= MAX_IMAGES:
                    raise Invalid("too_many_images", f"A form has at most {MAX_IMAGES} images.")
            case Data(piece):
                self._buffer += piece
                if len(self._buffer) > self._max_bytes:
                    raise Invalid("too_large", f"An image has at most {self._max_bytes} bytes.")
            case End():
                # If the person chose no file, a browser sends a part without a file name and without a byte.
                if self._is_file and (self._is_named or self._buffer):
                    self._keys.append(await self._store(bytes(self._buffer)))
                self._buffer.clear()

    async def _store(self, image: bytes) -> str:
        kind = sniff(image[:64])
        if kind not in _EXTENSIONS:
            raise Invalid("unsupported_format", "A source image is a JPEG, PNG or WebP.")
        file_name = f"{hashlib.sha256(image).hexdigest()}.{_EXTENSIONS[kind]}"
        tenant_id = self._caller.tenant_id
        # The key has a hash of the tenant's name, because the name may have characters that an object's key cannot
        # have.
        tenant_hash = hashlib.sha256(tenant_id.encode()).hexdigest()[:16]
        key = f"sources/{tenant_hash}/{file_name}"
        async with self._services.pool.acquire() as connection, connection.transaction():
            self.limit_fields = await self._services.admission.charge_upload(connection, self._caller.payer, len(image))
            # The row is written before the object, because housekeeping finds objects by their rows. The image must
            # live as long as its URL. The lifetime of the URL begins with the answer, which may be up to
            # _UPLOAD_SECONDS later.
            lifetime = timedelta(seconds=self._services.settings.generation_keep_seconds + _UPLOAD_SECONDS)
            expires_at = await generations.keep_source(connection, tenant_id, key, len(image), lifetime)
        if expires_at is not None:  # None: the same image was stored before
            self._new_keys[key] = expires_at
        await self._services.store.put(key, image, content_type=kind, metadata={})
        return key
