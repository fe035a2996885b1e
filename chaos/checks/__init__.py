"""The invariants of docs/explanation/chaos.md, by subject: `i3` checks I3, and the first line of its docstring says it.

A check yields an `Observation` for each thing that it compares, with evidence if the thing is wrong.
"""
