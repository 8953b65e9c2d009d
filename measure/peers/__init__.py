"""Other trainers as sides of an interleaved comparison."""
