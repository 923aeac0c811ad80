"""Trainings that combine features at random, on real clusters: `make combinations`.

seed -> Drawn (which features) -> run whole    -> the parameters after each step
                               -> run in parts -> the same, bit for bit
"""
