"""The limits of a tenant: rates, counts and bytes. Each is charged in the transaction that uses it.
May import `transitions` and the packages below that.
"""
