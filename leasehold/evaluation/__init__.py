"""Where client-written JSON Schemas are evaluated: in a child process that the kernel kills when it takes too long.

`evaluator` is the parent's side, `child` the program, `cost` what a schema would visit, `flat` the schemas that are so
simple that the parent evaluates them itself.
"""
