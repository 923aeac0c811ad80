"""Steps of a table, and the tickets that a caller waits on."""
