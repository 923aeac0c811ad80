"""The scheduler's machine: members, key ranges, tables, changes and checkpoints."""
