"""The pods of deploy/kubernetes as containers: `make pods-check`."""
