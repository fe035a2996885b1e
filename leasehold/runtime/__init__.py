"""Parts of every process: loops, retries, failpoints, the garbage collector. They know nothing of jobs."""
