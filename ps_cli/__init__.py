"""The command line: `pushpull train`, `pushpull up`, `pushpull status`, `pushpull version`."""
