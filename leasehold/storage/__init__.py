"""The object store. Every access of the platform to S3 goes through ObjectStore."""

from leasehold.storage.store import ObjectStore, Stored

__all__ = ["ObjectStore", "Stored"]
