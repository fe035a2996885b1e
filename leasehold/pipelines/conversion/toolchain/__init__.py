"""Work on models: load, optimise, quantise, compare. Heavy: only child processes import it."""
