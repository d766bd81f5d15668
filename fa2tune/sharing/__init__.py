"""What workers on many GPUs and hosts hold in common: one database, leases, studies, rows."""
