"""The worker, imported as `leasehold.worker`: claims tasks, runs their steps, publishes the outputs, and settles the
tasks. It imports nothing of the API.
"""
