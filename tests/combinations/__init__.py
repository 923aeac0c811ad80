"""Trainings that combine features at random, on real clusters: `make combinations`.

seed -> Drawn (which features) -> run whole                -> the parameters after each step
                               -> run in parts, with faults -> the same, bit for bit

seed -> Counted -> processes that join, die and are replaced -> each step is in the parameters once
"""
