"""Helpers that every process uses: loops, retries, failpoints, the garbage collector. They do not depend on jobs."""
