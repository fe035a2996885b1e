"""What a tenant may use: rates, counts and bytes, charged in the transaction that uses them.
May import `domain` and `db`.
"""
