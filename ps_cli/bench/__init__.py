"""Measurements of the data path, each beside the ceilings that the same machine shows in the same
run.

`pushpull bench NAME` runs one, `python -m ps_cli.bench` all of them. PERFORMANCE.md says what
each figure means. A benchmark passes or fails nothing: it prints a table and a JSON document.
"""
