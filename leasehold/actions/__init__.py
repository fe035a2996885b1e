"""Cancels, retries and deletes jobs of any kind, for clients and operators. Each function works in the caller's
transaction. The API calls these functions for one job. Bulk operations (leasehold.pipelines.operations) call them for
many jobs.
"""
