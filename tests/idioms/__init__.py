"""What torch users write, on a cluster and in plain torch: equal to the bit, or refused."""
