"""The terms of Leasehold: states, errors, leases, pipelines, templates.

Modules here do no input or output, and import no other package of Leasehold. Exception: `registry` imports the modules
with pipelines.
"""
