"""The console: pages, rendered by the server, on which a person observes and operates the installation.

A page reads with the functions that the endpoints of /v1 use. For an act of a person, the console calls the code of the
endpoint of /v1. So the checks and the audit are the same as for a program.
"""
