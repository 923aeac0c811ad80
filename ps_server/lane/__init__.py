"""Shared memory with workers of the same host, and the stores in it."""
