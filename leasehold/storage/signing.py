"""Signs URLs. By a signed URL, a client without the store's credentials reads or writes one object.

botocore computes the signatures. Its own `generate_presigned_url` is three times as slow, because each call also
evaluates botocore's endpoint rules and serialises the parameters. A UrlSigner asks botocore only once, for the address
of the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from leasehold.settings import Settings

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

#: The longest life of a signed URL in seconds. S3 refuses a URL that is signed for more than a week.
MAX_URL_SECONDS = 7 * 86_400
_ANY_KEY = "key"  # `of_client` gets a URL with this key, and cuts the key off, so that the bucket's address remains


def credentials_of(settings: Settings) -> ReadOnlyCredentials:
    """The store's access key and secret key, read from the settings now, because the files that hold these keys may
    change.
    """
    return ReadOnlyCredentials(
        settings.s3_access_key.get_secret_value(), settings.s3_secret_key.get_secret_value(), None
    )


class UrlSigner:
    """Signs URLs of objects in the bucket of `settings`."""

    def __init__(self, settings: Settings, region: str, bucket_address: str) -> None:
        """`bucket_address`: the URL to which an object's key is appended."""
        self._settings = settings
        self._region = region
        self._bucket_address = bucket_address

    @classmethod
    async def of_client(cls, client: S3Client, settings: Settings) -> UrlSigner:
        parameters = {"Bucket": settings.s3_bucket, "Key": _ANY_KEY}
        url, _, _ = (await client.generate_presigned_url("get_object", Params=parameters)).partition("?")
        return cls(settings, client.meta.region_name, url.removesuffix(_ANY_KEY))

    def sign(
        self,
        method: str,
        key: str,
        *,
        seconds: int,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> str:
        """A URL that is valid for `seconds`, at most MAX_URL_SECONDS. A request by this URL must have exactly these
        `headers`.
        """
        url = self._bucket_address + quote(key, safe="/~")
        request = AWSRequest(method, url, headers=headers, params=query)
        seconds = min(seconds, MAX_URL_SECONDS)
        S3SigV4QueryAuth(credentials_of(self._settings), "s3", self._region, expires=seconds).add_auth(request)
        return str(request.url)
