"""Hybrid training: rows, and what else one wants, on the servers; the rest among the workers."""
