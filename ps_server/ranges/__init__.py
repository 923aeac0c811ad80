"""Machines of a server's key ranges: entries, update gate, read gate, schedule."""
