"""The kind of work `media`: it resizes a picture, compresses it and writes it as WebP. The package also reads and
writes the rows of uploaded pictures.
"""
