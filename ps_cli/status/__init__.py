"""`pushpull status`, `tables` and `runs`."""
