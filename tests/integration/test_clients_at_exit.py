"""Scripts that end with a client that they did not close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ps_worker as ps
from tests.integration.command_line import ROOT, environment

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0

TRAINS = """
import sys
import torch
import pushpull as ps

def train(address):
    client, model = ps.connect(address), torch.nn.Linear(4, 2)
    optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=0.01))
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    return client

"""

OF_ITS_OWN = (
    TRAINS
    + """
with ps.local_cluster(checkpoint_url=sys.argv[1]) as cluster:
    client = train(cluster.address)
    if sys.argv[1]:
        client.checkpoint()
print("done")
"""
)

OF_ANOTHER = TRAINS + "client = train(sys.argv[1])\nprint('done')\n"


def ran(script: str, argument: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-c", script, argument], cwd=ROOT, env=environment(), check=False,
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_a_script_that_has_stopped_its_own_cluster_ends_without_a_word() -> None:
    assert ran(OF_ITS_OWN, "") == (0, "done\n", "")


@pytest.mark.thorough
def test_nor_is_there_an_error_where_it_waited_for_a_checkpoint(tmp_path: Path) -> None:
    code, output, said = ran(OF_ITS_OWN, str(tmp_path))
    assert (code, output) == (0, "done\n")
    assert "error " not in said.replace("error=", "")
    assert "Traceback" not in said
    assert "leave_failed" not in said


def test_a_worker_with_a_state_leaves_at_the_end_of_its_script(tmp_path: Path) -> None:
    """At the interpreter's end no thread starts any more, and its state is written all the same."""
    with ps.local_cluster(checkpoint_url=str(tmp_path)) as cluster:
        assert ran(OF_ANOTHER, cluster.address) == (0, "done\n", "")
        with ps.connect(cluster.address, role="operator") as operator:
            made = operator.checkpoint().wait()
    assert list(Path(made.url).parent.rglob("*worker*")), sorted(tmp_path.rglob("*"))
