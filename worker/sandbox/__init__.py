"""Child processes for isolated steps: zygotes, fences, and the protocol between worker and child."""
