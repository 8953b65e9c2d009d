"""Measure: what is faster, what learns more, and by how much."""
