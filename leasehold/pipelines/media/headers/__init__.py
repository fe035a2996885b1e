"""Reads the size and the number of frames from a picture's structure, without a decoder, without allocating pixels, and
in a bounded number of steps.

There is one module for each file format, with a function `read(data) -> Header`. `inspection` checks the header against
the limits before a decoder reads the file, and `decode` later compares the decoder's values with the header.
"""
