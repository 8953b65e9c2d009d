"""Ladders: stages, rungs, predictions, losses."""
