"""The benchmarks: each measures, and writes its document for a person."""
