"""Bringing a provider's files home: guarded, capped, and looked at before they are taken for what they claim to be."""

from __future__ import annotations

from pathlib import Path

from leasehold.pipelines.generation.provider import Kind
from leasehold.security.egress import AnswerTooLarge, Egress, EgressFailed, EgressRefused
from leasehold.settings import Settings

_SECONDS = 600.0
_REDIRECTS = 3
_OK = 200
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
#: DNS may come back.
_MAY_PASS = frozenset({"host_unknown"})

_IMAGES = (
    (b"\xff\xd8\xff", 0, "jpg", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", 0, "png", "image/png"),
    (b"GIF8", 0, "gif", "image/gif"),
    (b"WEBP", 8, "webp", "image/webp"),
    (b"ftypavif", 4, "avif", "image/avif"),
)
_VIDEOS = (
    (b"ftypqt  ", 4, "mov", "video/quicktime"),
    (b"ftyp", 4, "mp4", "video/mp4"),
    (b"\x1aE\xdf\xa3", 0, "webm", "video/webm"),
)


class Unfit(Exception):
    """This file will never be stored: `code` is stable, and the message is for the caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotNow(Exception):
    """The file could not be had this time."""


async def bring(egress: Egress, settings: Settings, kind: Kind, url: str, path: Path) -> tuple[str, str]:
    """Download `url` into `path`. Answers the extension and the content type that its bytes have.

    Raises Unfit, NotNow.
    """
    at_most = settings.generation_image_max_bytes if kind == "image" else settings.generation_video_max_bytes
    try:
        got = await egress.download(url, path, max_bytes=at_most, timeout=_SECONDS, redirects=_REDIRECTS)
    except AnswerTooLarge:
        raise Unfit("file_too_large", f"The provider's file has more than {at_most} bytes.") from None
    except EgressRefused as error:
        if error.code in _MAY_PASS:
            raise NotNow(str(error)) from None
        raise Unfit(error.code, str(error)) from None
    except EgressFailed as error:
        raise NotNow(str(error)) from None
    if got.status in _LATER:
        raise NotNow(f"the provider's file answered {got.status}")
    if got.status != _OK:
        raise Unfit("file_gone", f"The provider's file answered {got.status}.")
    if got.size == 0:
        raise Unfit("file_empty", "The provider's file is empty.")
    return kind_of(kind, got.head)


def kind_of(kind: Kind, head: bytes) -> tuple[str, str]:
    """Extension and content type, by the first bytes alone. Raises Unfit `not_an_image`, `not_a_video`."""
    for magic, at, extension, content_type in _IMAGES if kind == "image" else _VIDEOS:
        if head[at : at + len(magic)] == magic and (magic != b"WEBP" or head.startswith(b"RIFF")):
            return extension, content_type
    raise Unfit(*_WRONG[kind])


_WRONG = {
    "image": ("not_an_image", "The provider's file is no JPEG, PNG, GIF, WebP or AVIF."),
    "video": ("not_a_video", "The provider's file is no MP4, MOV or WebM."),
}
