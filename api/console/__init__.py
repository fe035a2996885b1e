"""The console: pages on which a person sees and runs the installation, rendered by the server.

A page reads with the functions behind /v1, and acts by calling the endpoints of /v1. So the checks and the audit are
the same as for a program.
"""
