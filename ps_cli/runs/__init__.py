"""`pushpull runs`."""
