"""Which pictures are accepted, and how their first bytes tell them apart. Light: the API imports it.

TIFF is one container for a dozen codecs: the common ones are accepted (headers/tiff.py), of its pages the first. SVG is
a program, not a picture. HEIC needs a codec that is under patents: workers have it by the extra `heic`, and the API is
told so by its settings.
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

#: The same files, which some clients call by the name of their container.
HEIC = {"image/heic", "image/heif"}

#: As many first bytes as `sniff` ever looks at: a ranged GET of this much decides.
HEAD_BYTES = 256

_STARTS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)
_LEAST_BMP = 26  # bytes, its header among them
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
_HEIF_BRANDS = {b"mif1", b"msf1"}


def sniff(head: bytes) -> str | None:
    """Tell the content type that the first bytes prove, or None for anything that is not accepted."""
    for start, content_type in _STARTS:
        if head.startswith(start):
            return content_type
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    if head.startswith(b"BM") and head[6:10] == b"\0\0\0\0" and len(head) > _LEAST_BMP:
        return "image/bmp"
    if head[4:8] == b"ftyp":
        return _by_brand(head[:HEAD_BYTES])
    return None


def is_as_declared(declared: str, real: str) -> bool:
    """Whether a file of the kind `real` may be called `declared`."""
    return declared == real or {declared, real} == HEIC


def _by_brand(head: bytes) -> str | None:
    """By the major brand, or by the first of ours that a generic HEIF lists as compatible."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brands = [head[8:12]]
    if brands[0] in _HEIF_BRANDS:
        brands += [head[at : at + 4] for at in range(16, end - 3, 4)]
    if _AVIF_BRANDS.intersection(brands):
        return "image/avif"
    return "image/heic" if _HEIC_BRANDS.intersection(brands) else None
