"""Evaluates the JSON Schemas that clients write, in a child process that the kernel kills when an evaluation takes too
long. `evaluator` is the parent's side, and `child` is the program of the child process. `cost` counts the nodes that an
evaluation would visit. `flat` compiles flat schemas. These are so simple that the parent evaluates them itself.
`templates` looks templates up and checks payloads.
"""
