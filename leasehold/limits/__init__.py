"""The limits of a tenant: rates, counts and bytes. A caller charges a limit in the transaction that uses the limit.
This package may import `transitions` and lower packages.
"""
