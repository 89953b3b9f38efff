"""The same checks on a real GPU, and what a scope gives and takes there: ``python -m tests.gpu``."""
