"""Values of blocks: stores, sums, optimizers, custom updates."""
