"""The edge that every role shares: gRPC servers and channels, errors, settings, logs, metrics."""

from __future__ import annotations

import os

# gRPC's core writes a line to stderr for every connection that a peer closes, an orderly end
# included, and reads this variable once, when it is first imported. Who set it means it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
