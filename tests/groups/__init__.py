"""What is released, and built again."""
