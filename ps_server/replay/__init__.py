"""Replay of the update logs of a run."""
