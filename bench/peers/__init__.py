"""`scripts/bench peers`: no-op jobs drained from a filled queue, by the platform and by six other systems, on the same
servers.

One job is a durable row or message, a committed completion, and a result row that can be read. Each peer is set up as
durably as its documentation allows (bench/peers/drivers). The bench itself counts result rows. The rate is that
of the last nine tenths of the jobs, so that the start of a system does not count. Each peer has an environment of its
own in the cache.
"""
