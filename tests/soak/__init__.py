"""A long random run that is the same for the same seed: ``python -m tests.soak --seconds 600 --seed 7``.

Reading order: ``events`` (what can happen, as data), ``outcomes`` and ``model`` (what should then be so),
``generator`` (a seed's events, drawn so that the model allows them), ``troubles`` (how a rank is made to fail),
``machines`` (Gloo posing as NCCL, or NCCL on its double), ``openers`` (the ways to write a scope), ``checks`` (what
is against what should be), ``rank`` (one rank's loop), ``__main__`` (the command).
"""
