"""Settings of a role, from flags and environment variables."""
