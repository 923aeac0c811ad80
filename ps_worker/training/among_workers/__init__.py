"""The workers among themselves, by torch.distributed: reductions, groups, waits for each other."""
