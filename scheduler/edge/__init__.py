"""The scheduler's gRPC service, its journal in SQLite, and its tasks."""
