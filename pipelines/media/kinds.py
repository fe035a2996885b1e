"""Which pictures are accepted, and how their first bytes tell them apart. Light: the API imports it.

TIFF is not accepted: one container for a dozen codecs, tiles and pages, with the longest list of decoder
faults of all formats, and hardly anything uploads it. SVG is a program, not a picture. HEIC needs a codec
that is under patents.
"""

from __future__ import annotations

#: Content type -> file name extension of the stored original.
ALLOWED: dict[str, str] = {
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/webp": "webp",
    "image/gif": "gif",
    "image/avif": "avif",
}

#: As many first bytes as `sniff` ever looks at: a ranged GET of this much decides.
HEAD_BYTES = 256

_AVIF_BRANDS = {b"avif", b"avis"}
_HEIF_BRANDS = {b"mif1", b"msf1"}


def sniff(head: bytes) -> str | None:
    """Tell the content type that the first bytes prove, or None for anything that is not accepted."""
    if head.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    if head[4:8] == b"ftyp" and _is_avif(head[:HEAD_BYTES]):
        return "image/avif"
    return None


def _is_avif(head: bytes) -> bool:
    """By brand: `avif` (still), `avis` (sequence), or a generic HEIF that lists one of them as compatible."""
    major = head[8:12]
    if major in _AVIF_BRANDS:
        return True
    end = min(int.from_bytes(head[:4], "big"), len(head))
    compatible = {head[at : at + 4] for at in range(16, end - 3, 4)}
    return major in _HEIF_BRANDS and bool(compatible & _AVIF_BRANDS)
