"""`hostile`: an honest tenant beside one attack after another, on a real API process and a real worker.

Every attack goes to loopback, and is bounded in count and time. `attacks` is the table of them; each is made by a
process of its own, so that what it costs its maker does not look like what it costs the platform.
"""
