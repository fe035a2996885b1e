"""Serves the console's files: its style, its scripts, and two libraries. The address of a file contains its hash.

htmx and idiomorph are copies of the files in their npm packages (0BSD). tests/console/test_assets.py compares the
hashes of the copies with those of the packages.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Path as InPath
from fastapi.responses import Response

from leasehold.domain.errors import NotFound

router = APIRouter()
FOLDER = Path(__file__).with_name("static")
#: Matches a header Accept-Encoding that allows gzip: it names gzip, and the weight of gzip is not 0.
_GZIP = re.compile(r"(?i)\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))")
#: The name in the address -> the file and its content type.
FILES = {
    "console.css": ("console.css", "text/css; charset=utf-8"),
    "console.js": ("console.js", "text/javascript; charset=utf-8"),
    "theme.js": ("theme.js", "text/javascript; charset=utf-8"),
    "htmx.js": ("vendor/htmx-2.0.11.min.js", "text/javascript; charset=utf-8"),
    "idiomorph.js": ("vendor/idiomorph-ext-0.8.0.min.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}


@cache
def content(name: str) -> bytes:
    return (FOLDER / FILES[name][0]).read_bytes()


@cache
def compressed(name: str) -> bytes:
    """The file, compressed with gzip. The console compresses these files, but never a page. A page contains both the
    secret token of its forms and text that other people wrote. The length of a compressed page could therefore reveal
    the token (BREACH).
    """
    return gzip.compress(content(name), mtime=0)


@cache
def version(name: str) -> str:
    """A part of the file's address. This part changes with the file, so that browsers may cache the file forever."""
    return hashlib.sha256(content(name)).hexdigest()[:12]


@router.get("/assets/{hashed}/{name}")
async def asset(
    request: Request,
    hashed: str,  # noqa: ARG001 - any hash is accepted, because a page from an older release has another hash
    name: Annotated[str, InPath(max_length=40)],
) -> Response:
    if name not in FILES:
        raise NotFound("not_found", "There is nothing at this address.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    body = content(name)
    if _GZIP.search(request.headers.get("accept-encoding", "")):
        headers["Content-Encoding"] = "gzip"
        body = compressed(name)
    return Response(body, HTTPStatus.OK, headers, media_type=FILES[name][1])
