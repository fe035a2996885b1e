"""The checks of a history, one module for each thing that is judged. The function `i3` checks the invariant I3 of
docs/explanation/chaos.md, and the first line of its docstring is that invariant.

A check yields an `Observation` for each thing that it compares, with evidence if the thing is wrong.
"""
