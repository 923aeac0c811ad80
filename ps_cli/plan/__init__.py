"""`pushpull plan`: the step time, the bottleneck and the cost of a cluster that does not exist."""
