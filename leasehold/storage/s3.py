"""Opens and configures the S3 clients of aioboto3, and translates their errors into the platform's errors.

Every request to the store runs inside a block `with request(...)`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError

from leasehold.domain.errors import ObjectMissing, StoreError, StoreUnavailable
from leasehold.file_secrets import stamp_of
from leasehold.runtime.holding import check_nothing_held
from leasehold.settings import Settings
from leasehold.storage.signing import credentials_of
from leasehold.telemetry.outages import STORE
from leasehold.telemetry.store import REQUESTS

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

# _MISSING_CODES: the store's error codes for a key that has no object. _REFUSED_CODES: for a refused conditional put.
_MISSING_CODES = {"NoSuchKey", "404", "NotFound"}
_REFUSED_CODES = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}


class PutRefused(StoreError):
    """The store refused a conditional put, because the condition does not hold (412), or because another put is under
    way (409).
    """


#: The class of an error -> the outcome that the metric REQUESTS counts.
_OUTCOMES = {ObjectMissing: "missing", PutRefused: "there already", StoreUnavailable: "unavailable"}


class _Session(AIOHTTPSession):
    """The HTTP session of a client. `verify`: a file of certificate authorities, or any other value that AIOHTTPSession
    accepts. If the file changes, later connections also trust the authorities that are new in the file.
    """

    def __init__(self, verify: Any = True, **options: Any) -> None:  # noqa: FBT002 - as AIOHTTPSession has it
        super().__init__(verify, **options)
        self._authorities = Path(verify) if isinstance(verify, str) else None
        self._stamp: object = None  # `stamp_of` the file when it was last read
        self._context: ssl.SSLContext | None = None

    def _get_ssl_context(self) -> Any:
        self._context = super()._get_ssl_context()  # type: ignore[misc]  # the stubs lack it
        return self._context

    async def send(self, request: Any) -> Any:
        if self._authorities is not None:
            self._read_again(self._authorities)
        return await super().send(request)

    def _read_again(self, authorities: Path) -> None:
        with suppress(OSError):  # if the file is just being replaced, a later request reads it
            stamp = stamp_of(authorities)
            if stamp != self._stamp:
                if self._context is not None:
                    self._context.load_verify_locations(authorities)
                self._stamp = stamp


def _client_config(settings: Settings) -> AioConfig:
    return AioConfig(
        http_session_cls=_Session,
        signature_version="s3v4",
        s3={"addressing_style": settings.s3_addressing},
        connect_timeout=3,
        read_timeout=30,
        retries={"mode": "standard", "total_max_attempts": 4},
        max_pool_connections=50,
        # Some S3 services do not know the newer trailing checksums. The platform itself checks the sha256 in the rows.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


class _Credentials(AioCredentials):
    """The access key and the secret key of the settings. Each signature reads them again, because the files that hold
    them may change.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        super().__init__("", "")

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:  # type: ignore[override]  # as aiobotocore has it: a coroutine
        return credentials_of(self._settings)


class _CredentialProvider:
    """The credential provider of a session. It always answers with the credentials of the settings."""

    def __init__(self, settings: Settings) -> None:
        self._credentials = _Credentials(settings)

    async def load_credentials(self) -> _Credentials:
        return self._credentials


@cache
def _shared_loader() -> Any:
    """The loader that all sessions of the process use, because reading botocore's descriptions of S3 takes 0.1 s."""
    return get_session().get_component("data_loader")


def _new_session(settings: Settings) -> aioboto3.Session:
    session = get_session()
    session.register_component("data_loader", _shared_loader())
    session.register_component("credential_provider", _CredentialProvider(settings))
    return aioboto3.Session(botocore_session=session)


def _verify_option(settings: Settings, endpoint: str | None) -> str | bool | None:
    """The option `verify` of a client: the file of the certificate authorities; None: botocore's own file.

    Without TLS the option is False. Otherwise the client would spend 30 ms to read authorities that it does not use.
    """
    is_plain_http = endpoint is not None and endpoint.startswith("http://")
    return False if is_plain_http else settings.s3_ca_file


@asynccontextmanager
async def open_client(settings: Settings, endpoint: str | None) -> AsyncIterator[S3Client]:
    async with _new_session(settings).client(
        "s3",
        endpoint_url=endpoint,
        region_name=settings.s3_region,
        verify=_verify_option(settings, endpoint),
        config=_client_config(settings),
    ) as client:
        yield client


@contextmanager
def request(operation: str, key: str) -> Iterator[None]:
    """The block around one request to the store. It measures the request, and raises errors of botocore and of the
    network as StoreErrors. The message of a StoreError contains the key and the store's code, and never a signed URL.

    A generator may yield inside the block. If the reader closes the generator early, the request counts as answered,
    because the reader has all the bytes that it needs.
    """
    check_nothing_held("the object store")  # reports a defect if this asyncio task holds a database connection
    started, outcome = perf_counter(), "ok"
    try:
        yield
    except ClientError as error:
        translated = _store_error_of(error, key)
        outcome = _OUTCOMES.get(type(translated), "refused")
        if outcome == "unavailable":
            STORE.record_error(translated, operation)
        raise translated from None
    except StoreUnavailable as error:  # raised inside the block, because the transfer was cut
        outcome = "unavailable"
        STORE.record_error(error, operation)
        raise
    except (BotoCoreError, aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        outcome = "unavailable"
        STORE.record_error(error, operation)
        raise StoreUnavailable(f"{key}: the object store did not answer ({type(error).__name__})") from None
    except GeneratorExit:  # the reader has closed the generator
        raise
    except BaseException:
        outcome = "left"  # the block was cancelled, or raised an error of another kind
        raise
    finally:
        if outcome not in ("unavailable", "left"):  # a refusal is an answer, too
            STORE.record_answer()
        REQUESTS.labels(operation, outcome).observe(perf_counter() - started)


@contextmanager
def suppress_refused_range() -> Iterator[None]:
    """Suppress the answer 416, with which the store refuses to send the first bytes of an empty object."""
    try:
        yield
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 416:  # noqa: PLR2004 - HTTP's own
            raise


def with_lower_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata of an object, with names in lower case. Some stores answer with names in upper case."""
    return {name.lower(): value for name, value in metadata.items()}


def _store_error_of(error: ClientError, key: str) -> StoreError:
    answer: Any = error.response
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":  # an operator can mend this, so no job may fail for good because of it
        return StoreUnavailable(f"{key}: the object store has no such bucket")
    if code in _MISSING_CODES or status == 404:  # noqa: PLR2004 - HTTP's own numbers, here and below
        return ObjectMissing(key)
    if code in _REFUSED_CODES or status in (409, 412):
        return PutRefused(key)
    if status in (401, 403):
        return StoreError(f"{key}: the object store refused the platform's credentials ({code})")
    return StoreUnavailable(f"{key}: the object store answered {status} {code}")
