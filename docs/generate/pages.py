"""The pages of the reference, and the comment with which each begins."""

from __future__ import annotations

import json
from pathlib import Path

from docs.generate import commands, errors, http, metrics, settings
from leasehold.api.app import make_app
from leasehold.api.http.openapi import document
from leasehold.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/reference"
_HEAD = "<!-- Written by scripts/reference from the code. Change the code, then run it again. -->\n\n"
_PAGES = {
    "settings.md": settings.page,
    "http.md": http.page,
    "errors.md": errors.page,
    "metrics.md": metrics.page,
    "commands.md": commands.page,
}


#: The document of the API, for programs that generate a client.
OPENAPI = "openapi.json"
NAMES = (*_PAGES, OPENAPI)


def pages() -> dict[str, str]:
    """File name in docs/reference -> its whole text."""
    texts = {name: f"{_HEAD}{page().strip()}\n" for name, page in _PAGES.items()}
    return texts | {OPENAPI: f"{json.dumps(document(make_app(Settings.model_construct())), indent=1)}\n"}
