"""`pushpull tables`."""
