"""What workers do among themselves, by torch.distributed."""
