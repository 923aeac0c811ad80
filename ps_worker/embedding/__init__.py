"""A worker's rows of embedding tables, without I/O: ids cut by partition, and the cache of rows."""
