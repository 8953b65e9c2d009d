"""Ladders: stages, rungs, predictions, and what a rung learns."""
