"""The statements that take, renew and end this worker's leases, each on a connection of its own.

Slot pools claim, the heartbeat renews, attempts settle. These modules import `sandbox` and the rooms below it, never
`attempts` or `claiming`.
"""
