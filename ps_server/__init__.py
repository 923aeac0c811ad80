"""The parameter server: `pushpull server` runs it; ARCHITECTURE.md has the tour."""
