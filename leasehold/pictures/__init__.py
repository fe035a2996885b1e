"""Functions that process pictures with Pillow. Several kinds of work use them, only in child processes of workers."""
