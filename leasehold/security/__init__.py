"""API keys, roles, sign-in, sealed secrets, signatures, and requests to URLs that clients name.
May import `db` and the packages below it.
"""
