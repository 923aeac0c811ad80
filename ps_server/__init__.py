"""The parameter server: `pushpull server` runs it; docs/ARCHITECTURE.md has the tour."""
