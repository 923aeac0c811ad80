"""`pushpull train` and `pushpull up`: a cluster on this machine."""
