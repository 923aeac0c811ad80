"""A node's membership: registration, the link to the scheduler, and the cluster's messages."""
