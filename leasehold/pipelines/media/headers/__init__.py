"""Reads the size and the number of frames from a picture's structure, without a decoder, without allocating pixels, and
in a bounded number of steps.

There is one module for each container, each with `read(data) -> Header`. `inspection` checks the limits on this header
before a decoder reads the file, and `decode` compares the decoder's values with the header afterwards.
"""
