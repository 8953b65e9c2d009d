"""Faster or smaller forms of what stands in model.py: of the loss, switched on by an option, and of
reading a text that grows. The plain form stays beside the call.
"""
