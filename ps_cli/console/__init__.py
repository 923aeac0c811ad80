"""Output, errors and options that several commands share."""
