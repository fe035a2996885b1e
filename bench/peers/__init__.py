"""`scripts/bench peers`: no-op jobs drained from a filled queue, ours and six others, on the same servers in one run.

One job is a durable row or message, a committed completion, and a result row that can be read; each peer is set up as
durably as its documentation lets it (bench/peers/drivers). The rate is that of the last nine tenths, seen from
outside by counting result rows, so that nobody's start counts. Each peer has an environment of its own in the cache.
"""
