"""Processes that take part in a benchmark: pushpull's, its rivals, and the machine's own limits."""
