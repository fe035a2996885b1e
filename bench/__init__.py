"""The figures of docs/explanation/performance.md: `scripts/bench`, one module a figure, on private servers of its own."""
