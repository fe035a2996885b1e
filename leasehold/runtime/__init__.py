"""How our processes run: loops, failpoints, the garbage collector. Knows nothing of jobs."""
