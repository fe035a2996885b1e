"""`hostile`: an honest tenant beside one attack after another, on a real API process and a real worker.

Every attack goes to loopback, and is bounded in count and time. `attacks` lists them. Each attack runs in a process of
its own, so that its own cost does not count as the platform's.
"""
