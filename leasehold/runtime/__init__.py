"""Helpers that every process uses: loops, retries, failpoints, the garbage collector. They know nothing of jobs."""
