"""The scheduler's journal: records of its state, and the seam to the store that keeps them."""
