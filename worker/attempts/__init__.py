"""Runs one attempt: fetches the inputs, runs the handler, publishes the outputs, settles. These modules import
worker/leases, but not worker/claiming, because an attempt uses its slot (its room in the worker) only through the
protocol in slot.py.
"""
