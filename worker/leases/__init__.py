"""What this worker writes with a lease in its hands: claim a lease, renew it, settle it.

The slot pools claim, the attempts settle; neither knows the other's connection. Imports sandbox and below, never
attempts or claiming.
"""
