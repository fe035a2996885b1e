"""The hooks of a kind of work: the types that a kind's own modules return to the core, and the functions that load
them.

This package imports only lower packages of the core. Kinds of work import it: those of the platform
(`leasehold.pipelines.<kind>`), and those in packages from outside.
"""
