"""Measurements: JSON with the environment, and ratios against ceilings of the same run."""
