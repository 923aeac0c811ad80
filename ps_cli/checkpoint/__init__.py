"""`pushpull checkpoint`."""
