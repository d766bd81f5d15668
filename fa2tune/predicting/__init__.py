"""Times of kernels on GPUs that need not be there."""
