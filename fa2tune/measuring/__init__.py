"""Times and errors of kernels on the GPU that is there, taken in processes that may die."""
