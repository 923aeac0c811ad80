"""Gradients and values in fewer bits than their table's."""
