"""Profiles: times of passes, breakdown of a step, scaling over ranks."""
