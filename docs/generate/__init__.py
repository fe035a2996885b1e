"""Writes the pages of docs/reference from the code: `scripts/reference`.

Each page has a module with `page() -> str`. The wheel does not have this package, and it starts no server.
"""
