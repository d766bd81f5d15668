"""The life of a cache file after the tune: coverage, precompiling, locking, verifying, repairing."""
