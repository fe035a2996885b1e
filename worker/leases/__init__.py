"""The statements that take, renew and end this worker's leases, each on a connection of its own.

Slot pools claim, the heartbeat renews, attempts settle. These modules never import worker/attempts or worker/claiming,
which stand above them (tests/test_floors.py).
"""
