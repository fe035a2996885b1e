"""The work on models: load, optimise, quantise, compare. Only child processes import this package, because its
libraries are heavy.
"""
