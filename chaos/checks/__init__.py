"""The invariants, by subject. A check yields a `Seen` for each thing that it looks at, with evidence if it is wrong."""
