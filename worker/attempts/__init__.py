"""One attempt: fetch inputs, run the handler, publish outputs, settle. These modules know leases. They do not import
worker/claiming: an attempt sees its slot (its room in the worker) only by the protocol in slot.py.
"""
