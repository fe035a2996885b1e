"""Evaluates the JSON Schemas that clients write, in a child process that the kernel kills when an evaluation takes too
long. `evaluator` is the parent's side, `child` the program, `cost` counts what a schema would visit, and `flat` has
the schemas that are so simple that the parent evaluates them itself. `templates` looks templates up and checks
payloads.
"""
