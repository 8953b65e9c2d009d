"""Measurements of the model and its parts, for bench.py, and of the loader, of checkpoints and
against transformers.
"""
