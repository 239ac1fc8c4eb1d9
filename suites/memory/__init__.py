"""The memory suite: lifetimes, static checks, snapshots and reconciliation of memory maps."""
