"""The work on models: load, optimise, quantise, compare. Only child processes import it, because its libraries are
heavy.
"""
