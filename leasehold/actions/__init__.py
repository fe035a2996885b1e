"""What a client or an operator does to a job of any kind: cancel, retry, delete. Each function works in the caller's
transaction. The API calls them for one job, and bulk operations (leasehold.pipelines.operations) for many.
"""
