"""What scopes do: over a world that only writes down what is asked of it, and on real ranks."""
