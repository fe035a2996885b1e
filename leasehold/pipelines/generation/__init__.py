"""The kind of work `generation`: a worker orders images or videos from a provider, polls for up to a day, and stores
the files.
"""
