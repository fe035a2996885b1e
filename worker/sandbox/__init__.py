"""Child processes for isolated steps: zygotes (which fork the children), fences (what keeps a child from files and the
network), and the protocol between worker and child.
"""
