"""The kind of work `generation`: a provider makes images or videos, and a worker submits, polls for up to a day, and
stores the files.
"""
