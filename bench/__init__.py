"""The figures of docs/explanation/performance.md: `scripts/bench`, a module each, on private servers of its own."""
