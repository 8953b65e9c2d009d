"""Ladders: stages, results, predictions, losses."""
