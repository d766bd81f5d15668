"""Beside the peers: what is compared, how it is timed, and how it is shown."""
