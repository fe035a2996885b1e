"""Takes, renews and ends this worker's leases. Each of these three kinds of statement has its own connection.

Slot pools claim, the heartbeat renews, attempts settle. These modules never import worker/attempts or worker/claiming,
because those two packages import worker/leases (tests/test_floors.py).
"""
