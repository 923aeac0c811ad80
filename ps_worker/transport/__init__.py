"""The engine of a worker: links to servers, pushes, pulls, lanes."""
