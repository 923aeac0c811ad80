"""Messages between servers and workers, and between servers, to and from protobuf."""
