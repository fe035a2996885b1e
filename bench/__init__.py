"""The figures of docs/performance.md: `scripts/bench`, one module a figure, on private servers of its own."""
