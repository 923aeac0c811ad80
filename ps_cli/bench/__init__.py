"""Benchmarks of the data path, each beside ceilings that are measured in the same run.

`pushpull bench NAME` runs one, `python -m ps_cli.bench` all of them. A benchmark has no verdict: it
prints a table and a JSON document. docs/reference/BENCHMARKS.md explains the figures.
"""
