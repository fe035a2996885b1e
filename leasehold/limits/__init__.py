"""The limits of a tenant: rates, counts and bytes. A caller charges a limit in the same transaction that writes what
the limit counts. This package may import `transitions` and lower packages.
"""
