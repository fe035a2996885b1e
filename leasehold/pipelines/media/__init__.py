"""The kind of work `media`: it resizes a picture, compresses it and writes it as WebP. It also has the rows of uploaded
pictures.
"""
