"""The pure vocabulary and rules that every role shares: no I/O, no clock, no randomness."""
