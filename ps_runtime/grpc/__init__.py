"""gRPC servers, channels, addresses, and errors on the wire."""
