"""Code that every role shares and that touches the world: gRPC, settings, logs, metrics, files."""

from __future__ import annotations

import os

# gRPC's core logs to stderr each connection that a peer closes, even in order. It reads this
# variable once, at its first import. A user's own value stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# gRPC handles forks by default, and then a child that is forked beside a client, such as a
# DataLoader's worker, crashes in a few of ten cases. No child uses a client.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
