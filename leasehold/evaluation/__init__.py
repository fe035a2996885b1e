"""Evaluates the JSON Schemas that clients write, in a child process that the kernel kills when an evaluation takes too
long. Exception: flat schemas are so simple that the parent process evaluates them itself.

`evaluator` is the parent's side, and `child` is the program of the child process. `cost` counts the nodes that an
evaluation would visit. `flat` compiles flat schemas. `templates` finds templates and checks payloads against them.
"""
