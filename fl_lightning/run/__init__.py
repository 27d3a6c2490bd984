"""A run on disk: its directory, tables, checkpoints, log, and how it is continued."""
