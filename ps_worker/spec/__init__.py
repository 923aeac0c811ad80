"""Specifications: optimizers, tables, training options, the cut of arrays into blocks."""
