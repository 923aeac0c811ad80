"""A worker's own state in checkpoints."""
