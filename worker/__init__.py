"""The worker, imported as `leasehold.worker`: claims leases, runs steps, publishes outputs, settles.
It imports nothing of the API.
"""
