"""Machines of replication: primary, backup, log of decisions, output commit."""
