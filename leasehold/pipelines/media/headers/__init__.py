"""What a file says about itself, read by walking its structure: no decoder, no allocation, bounded steps.

One module per container, each with `read(data) -> Header`. The limits are checked on the result before a
decoder sees the file, and the decoder's own opinion is compared with it afterwards.
"""
