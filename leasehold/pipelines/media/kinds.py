"""The accepted content types of pictures, and how their first bytes show the type. This module imports no heavy
library, because the API imports it.

TIFF is a container for a dozen codecs. The common codecs are accepted (headers/tiff.py), and only the first page
counts. SVG is refused because it is a program. HEIC needs a patented codec. So the API accepts HEIC only if a setting
allows it, and a worker then needs the package's extra `heic`.
"""

from __future__ import annotations

#: Content type -> file name extension of the stored original.
ALLOWED: dict[str, str] = {
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/webp": "webp",
    "image/gif": "gif",
    "image/avif": "avif",
    "image/tiff": "tif",
    "image/bmp": "bmp",
    "image/heic": "heic",
    "image/heif": "heif",
}

#: Two names for the same type of file, because some clients use the name of the container.
HEIC = {"image/heic", "image/heif"}

#: `sniff` reads at most this many bytes from the beginning, so a ranged GET of this size is enough.
HEAD_BYTES = 256

#: The first bytes of a file, and the content type that they show.
_STARTS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)
_BMP_HEADER_BYTES = 26  # the file header and the shortest header of a picture
#: The header of an ISO base media file names its formats by brands. The brands of HEIF are generic: AVIF files have
#: them, too.
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_HEIF_BRANDS = {b"mif1", b"msf1"}


def sniff(head: bytes) -> str | None:
    """The content type that the first bytes show. Returns None if the file is of no accepted type."""
    for start, content_type in _STARTS:
        if head.startswith(start):
            return content_type
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    has_reserved_zeros = head[6:10] == b"\0\0\0\0"  # needed because text may also begin with "BM"
    if head.startswith(b"BM") and has_reserved_zeros and len(head) > _BMP_HEADER_BYTES:
        return "image/bmp"
    if head[4:8] == b"ftyp":
        return _by_brand(head[:HEAD_BYTES])
    return None


def is_as_declared(declared: str, actual: str) -> bool:
    """Whether a client may give `declared` as the content type of a file whose type is `actual`."""
    return declared == actual or {declared, actual} == HEIC


def _by_brand(head: bytes) -> str | None:
    """The content type by the major (first) brand. If this brand is generic (HEIF), the other brands decide, too."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12]]
    if brands[0] in _HEIF_BRANDS:
        brands += [head[position : position + 4] for position in range(16, end - 3, 4)]
    if _AVIF_BRANDS.intersection(brands):
        return "image/avif"
    return "image/heic" if _HEIC_BRANDS.intersection(brands) else None
