"""The invariants, by subject. A check yields a sentence of evidence for each violation that it finds."""
