"""`scripts/mutants`: each guard of the platform is changed once, by machine, and a test must notice.

`places` lists what is changed, `sql` and `python` change it, `copies` and `nursery` run the tests beside one change,
`run` does so for all. docs/explanation/mutants.md says what comes of it.
"""
