"""How communicators give their memory back, and take it again.

``strategy`` is what all ways have in common, ``rebuild`` and ``suspend`` are the ways, and ``pool`` has the few threads
that do the work, each job with a bound.
"""
