"""Replication between the servers of a cluster: links, streams, the joined machines."""
