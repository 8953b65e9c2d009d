"""One script per corpus that writes token files, and what they share. Token files lie in a folder
here per corpus.
"""
