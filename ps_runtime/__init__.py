"""The edge that every role shares: gRPC servers and channels, errors, settings, logs, metrics."""

from __future__ import annotations

import os

# gRPC's core writes a line to stderr for every connection that a peer closes, an orderly end
# included, and reads this variable once, when it is first imported. Who set it means it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# With gRPC's own handlers of forks, which it has by default, a child that is forked beside a client
# crashes in a few of ten cases: a DataLoader's workers are such. No client is used in a child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
