"""Interleaved comparisons: sides, rounds, and the ratio with its interval."""
