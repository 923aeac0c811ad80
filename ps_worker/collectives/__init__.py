"""Rounds of collective calls, and the values in them."""
