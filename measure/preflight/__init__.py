"""Estimates and checks before a long run."""
