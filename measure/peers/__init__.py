"""Other trainers as sides of an interleaved comparison."""

# names of sides that are not files
TRANSFORMERS, MATMULS, OURS = "transformers", "matmuls", "ours"
