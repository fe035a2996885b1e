"""Measures the figures of docs/explanation/performance.md: `scripts/bench`. Each figure is a module, on private
servers.
"""
