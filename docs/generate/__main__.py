"""Writes every generated file whose text has changed, and prints its name."""

from __future__ import annotations

import sys

from docs.generate import typescript, values_schema
from docs.generate.pages import FOLDER, pages


def main() -> None:
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote docs/reference/{name}\n")
    path = typescript.FOLDER / "openapi.json"
    if path.read_text() != (text := typescript.subset()):
        path.write_text(text)
        sys.stdout.write("wrote clients/typescript/openapi.json: run `npm ci && npm run types` there\n")
    if values_schema.PATH.read_text() != (text := values_schema.text()):
        values_schema.PATH.write_text(text)
        sys.stdout.write("wrote deploy/helm/leasehold/values.schema.json\n")


main()
