"""gRPC over an HTTP/2 of our own, for the streams that move parameters.

`frames`, `header_blocks`, `streams`, `output` and `connection` are the protocol, without input or
output; `grpc_fields` has gRPC's header fields. `transport` joins a connection to a socket; `server`
and `channel` are the two ends for the rest of pushpull.
"""
