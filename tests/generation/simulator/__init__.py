"""The providers' documented protocols over real HTTP, with everything that can go wrong on request.

What a generation meets is said in its prompt, by words that begin with `#` (see work.Script).
"""
