"""The server's gRPC service, and the works that carry out what its machines decide."""
