"""The hooks of a kind of work: the types that a kind's own modules return to the core, and the functions that load
them.

This package imports only lower packages of the core. Kinds of work import it: the platform's own kinds
(`leasehold.pipelines.<kind>`), and the kinds in other packages.
"""
