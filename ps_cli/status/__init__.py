"""`pushpull status`."""
