"""The edge that every role shares: gRPC servers and channels, errors, settings, logs, metrics."""
