"""Imported where the tests fork commands from, so that these have GPT-2's encoding at hand."""

from data.tokenizer import get_encoding

get_encoding()
