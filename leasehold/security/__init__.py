"""Keys, secrets, signatures, and requests to addresses that strangers name.
May import `domain` and `db`.
"""
