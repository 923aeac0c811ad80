"""Rows of embedding tables: where they are, and the arithmetic of their updates."""
