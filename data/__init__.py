"""Scripts that write corpora, folders of token files, and their shared code."""
