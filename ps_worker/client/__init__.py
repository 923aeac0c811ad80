"""The client: connection, tables, checkpoints, collective calls."""
