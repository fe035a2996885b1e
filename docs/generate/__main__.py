"""Write every page that differs, and say which."""

from __future__ import annotations

import sys

from docs.generate import typescript
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


main()
