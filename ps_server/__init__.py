"""The parameter server: `python -m ps_server` runs it; docs/ARCHITECTURE.md has the tour."""
