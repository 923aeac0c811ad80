"""Roles as processes: their start and their end."""
