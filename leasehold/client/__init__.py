"""For programs that speak to a Leasehold API over HTTP. Imports nothing of the server."""
