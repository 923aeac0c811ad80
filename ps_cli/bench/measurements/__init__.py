"""The benchmarks: each measures, and has a view of its document for a person."""
