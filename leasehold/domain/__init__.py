"""The terms of Leasehold: states, errors, leases, pipelines, templates.

Modules here do no input or output, except that `registry` imports the modules with pipelines. They import no other
room.
"""
