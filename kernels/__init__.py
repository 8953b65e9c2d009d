"""Faster or smaller forms of what stands in model.py, each switched on by an option; the plain form stays beside its call."""
