"""A run: jobs under leases, processes that compile and launch, progress."""
