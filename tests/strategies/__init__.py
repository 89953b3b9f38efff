"""The threads that do the work."""
