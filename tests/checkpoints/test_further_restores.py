"""What `tests/integration/test_restore.py` shows of one lane and of workers, of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ps_worker as ps
from tests.integration.test_restore import (
    DEADLINE_S,
    ONES,
    check_never_lands,
    connect,
    counting_table,
)


def test_a_push_that_is_on_its_way_never_lands(tmp_path: Path) -> None:
    check_never_lands(tmp_path, "grpc")


def test_an_operator_may_restore_and_the_worker_is_told(tmp_path: Path) -> None:
    """It goes on from there."""
    running = ps.local_cluster(1, 1, checkpoint_url=str(tmp_path / "checkpoints"))
    with running as cluster:
        client = connect(cluster, 0, "auto")
        table = counting_table(client)
        client.push_pull(table, ONES)
        made = client.checkpoint().wait()
        client.push_pull(table, ONES)
        with ps.connect(
            cluster.address, role="operator", request_deadline_s=DEADLINE_S
        ) as operator:
            operator.restore(made.url).close()

        def train() -> None:
            while True:
                client.push_pull(table, ONES)

        with pytest.raises(ps.Fenced, match="restored from"):
            train()
        with client.restore(made.url) as again:
            assert np.asarray(again.pull(counting_table(again)))[0] == -1
