"""How the ranks decide."""
