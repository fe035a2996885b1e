"""What Leasehold talks about: states, errors, leases, pipelines, templates. Pure: no input or output, and it imports
nothing of ours but itself.
"""
