"""Machines of HTTP/2: frames, headers, streams, flow control and bounds. They touch no socket."""
