"""`scripts/mutants`: changes each guard of the platform once, by machine. For each change, a test must fail.

`places` lists the files. `sql` and `python` make the changes. `copies` and `nursery` run the tests with one change;
`run` does so for all changes. docs/explanation/mutants.md has the results.
"""
