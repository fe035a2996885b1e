"""From a hint or a poll to a claimed lease: slots, fair shares between tenants, batches of claims."""
