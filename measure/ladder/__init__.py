"""Ladders: stages, stages, predictions, losses."""
