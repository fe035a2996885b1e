"""The kind of work `media`: a picture is resized, compressed and written as WebP. Also the rows of
uploaded pictures.
"""
