"""A server's parts of checkpoints, written and restored."""
