"""The hooks of a kind of work, as the core calls them: what a kind's own modules return, and how they are found.

Imports the core's lower rooms only. Kinds (`leasehold.pipelines.<kind>`, or a package of somebody else's) import it.
"""
