"""Training with torch: the optimizer, trained tables and models, staging, buffers, samplers."""
