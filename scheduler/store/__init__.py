"""Records of the scheduler's state, and the seam to the store that keeps them."""
