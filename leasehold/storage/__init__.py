"""The object store: S3, spoken to in one way."""

from leasehold.storage.store import ObjectStore, Stored

__all__ = ["ObjectStore", "Stored"]
