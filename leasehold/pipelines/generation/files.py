"""Downloads a provider's files for the step `store` of a generation. (In a generation, a client orders images or a
video.) Links to private addresses are refused, and the sizes of files are bounded. The first bytes of a file decide its
type, and not the Content-Type that the provider sends.
"""

from __future__ import annotations

from pathlib import Path

from leasehold.pipelines.generation.provider import Kind
from leasehold.security.egress import AnswerTooLarge, Egress, EgressFailed, EgressRefused
from leasehold.settings import Settings

_TIMEOUT_SECONDS = 600.0  # the longest time that one download may take
_REDIRECTS = 3  # the most redirects that one download follows
_OK = 200
#: HTTP statuses of the link after which another attempt may succeed.
_TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
#: The codes of EgressRefused after which another attempt may succeed, because DNS may work again later.
_TEMPORARY_REFUSALS = frozenset({"host_unknown"})

# Each entry: the bytes that show a type, their position in the file, the extension and the content type. The first
# entry that matches counts.
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
#: The code and the message for a file of no accepted type.
_WRONG_TYPE = {
    "image": ("not_an_image", "The provider's file is not a JPEG, PNG, GIF, WebP or AVIF."),
    "video": ("not_a_video", "The provider's file is not an MP4, MOV or WebM."),
}


class UnusableFile(Exception):
    """The file cannot be stored, and another download would not help. `code` is stable; the message is for clients."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FileUnavailable(Exception):
    """The file could not be downloaded now. Another attempt may succeed."""


async def download(egress: Egress, settings: Settings, kind: Kind, url: str, path: Path) -> tuple[str, str]:
    """Download `url` into `path`. Returns the extension and the content type that the file's first bytes show.

    Raises UnusableFile or FileUnavailable.
    """
    max_bytes = settings.generation_image_max_bytes if kind == "image" else settings.generation_video_max_bytes
    try:
        answer = await egress.download(url, path, max_bytes=max_bytes, timeout=_TIMEOUT_SECONDS, redirects=_REDIRECTS)
    except AnswerTooLarge:
        raise UnusableFile("file_too_large", f"The provider's file has more than {max_bytes} bytes.") from None
    except EgressRefused as error:
        if error.code in _TEMPORARY_REFUSALS:
            raise FileUnavailable(str(error)) from None
        raise UnusableFile(error.code, str(error)) from None
    except EgressFailed as error:
        raise FileUnavailable(str(error)) from None
    if answer.status in _TEMPORARY_STATUSES:
        raise FileUnavailable(f"The link to the provider's file answered {answer.status}.")
    if answer.status != _OK:
        raise UnusableFile("file_gone", f"The link to the provider's file answered {answer.status}.")
    if answer.size == 0:
        raise UnusableFile("file_empty", "The provider's file is empty.")
    return file_type_of(kind, answer.head)


def file_type_of(kind: Kind, head: bytes) -> tuple[str, str]:
    """The extension and the content type that the first bytes show. Raises UnusableFile `not_an_image` or
    `not_a_video`.
    """
    # A WebP file has WEBP at position 8, and also begins with RIFF.
    for magic, position, extension, content_type in _IMAGES if kind == "image" else _VIDEOS:
        if head[position : position + len(magic)] == magic and (magic != b"WEBP" or head.startswith(b"RIFF")):
            return extension, content_type
    raise UnusableFile(*_WRONG_TYPE[kind])
