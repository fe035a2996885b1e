"""Downloads the uv of scripts/uv.txt with only the standard library, for a Python without pip. Called by
scripts/env.sh.

    fetch_uv.py REQUIREMENTS TARGET

The package index is $PIP_INDEX_URL, or PyPI. The downloaded wheel must have one of the sha256 sums in REQUIREMENTS.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import urllib.request
import zipfile
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from urllib.parse import urldefrag, urljoin

TIMEOUT_SECONDS = 60


class Links(HTMLParser):
    """Reads an index page. `by_sum`: the sha256 sum that a link has in its fragment -> the link's URL."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.by_sum: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        url, fragment = urldefrag(dict(attrs).get("href") or "")
        if tag == "a" and fragment.startswith("sha256="):
            self.by_sum[fragment.removeprefix("sha256=")] = urljoin(self.page, url)


def runs_here(file_name: str) -> bool:
    """Whether the wheel with this name is for this machine."""
    tags = file_name.removesuffix(".whl").split("-")[-1]
    if platform.machine() not in tags and not (sys.platform == "darwin" and tags.endswith(platform.machine())):
        return False
    if sys.platform == "darwin":
        return "macosx" in tags
    return ("manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux") in tags


def download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - the index of the user's choice
        return bytes(response.read())


def main() -> None:
    requirements, target = Path(sys.argv[1]), Path(sys.argv[2])
    allowed_sums = re.findall(r"sha256:([0-9a-f]{64})", requirements.read_text())
    page = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/uv/"
    links = Links(page)
    links.feed(download(page).decode())
    for allowed_sum in allowed_sums:
        url = links.by_sum.get(allowed_sum)
        if url is None or not runs_here(url.rpartition("/")[2]):
            continue
        wheel = download(url)
        if hashlib.sha256(wheel).hexdigest() != allowed_sum:
            sys.exit("the downloaded wheel of uv has a sha256 sum that scripts/uv.txt does not have")
        with zipfile.ZipFile(BytesIO(wheel)) as archive:
            program = next(name for name in archive.namelist() if name.endswith(".data/scripts/uv"))
            target.write_bytes(archive.read(program))
        target.chmod(0o755)
        return
    sys.exit(f"no uv for {sys.platform} {platform.machine()} at the package index; install uv 0.13 or newer yourself")


if __name__ == "__main__":
    main()
