"""`pushpull replay`."""
