"""Optional kernels: blocked CPU attention, chunked cross-entropy."""
