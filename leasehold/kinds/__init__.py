"""The hooks of a kind of work: the types that a kind's own modules return to the core, and the functions that load
them.

It imports the lower rooms of the core only. Kinds import it: `leasehold.pipelines.<kind>`, and packages from outside.
"""
