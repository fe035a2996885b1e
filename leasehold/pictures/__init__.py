"""Functions for pictures, with Pillow, for several kinds of work. Only child processes of workers import them."""
