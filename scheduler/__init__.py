"""The scheduler: membership, tables and placement; `pushpull scheduler` runs it."""
