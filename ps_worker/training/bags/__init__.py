"""Several tables of rows in one module, and the batches of bags that it takes."""
