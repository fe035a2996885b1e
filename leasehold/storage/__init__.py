from leasehold.storage.store import ObjectStore, Stored

__all__ = ["ObjectStore", "Stored"]
