"""The push window: numbered entries that are sent until each has its outcome."""
