"""The update log: written, read, recovered."""
