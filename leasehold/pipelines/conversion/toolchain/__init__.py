"""Loads, optimises, quantises and compares models. Only child processes import this package, because its libraries are
heavy.
"""
