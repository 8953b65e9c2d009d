"""Keep a run safe, honest and fast. Nothing here knows of GPT-2 or imports from the folder
above: values are handed in.
"""
