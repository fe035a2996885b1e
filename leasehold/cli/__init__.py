"""The command `leasehold`."""
