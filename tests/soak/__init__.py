"""A random but seeded mix of all that can happen, on real ranks: ``python -m tests.soak``.

``events`` says what can happen and draws it from a seed, ``rank`` does it on one rank and checks what is so
afterwards, ``machines`` are what it runs on: Gloo, or the real ProcessGroupNCCL on its double.
"""
