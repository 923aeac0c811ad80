"""pushpull: the generated stubs of the contract (`pushpull.v1`)."""
