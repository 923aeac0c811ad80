"""The scheduler: membership, tables and placement; `python -m scheduler` runs it."""
