"""Checkpoint files: the store, directories, parts, references between checkpoints."""
