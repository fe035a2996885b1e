"""The pages of docs/reference, written from the code itself: `scripts/reference`.

One module a page; each has `page() -> str`. Nothing here is installed, and no server is started.
"""
