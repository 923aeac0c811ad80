"""The rank that a process has in its job, as launchers and operators tell it."""

from __future__ import annotations

import pytest

from ps_core.errors import InvalidConfig
from ps_runtime.settings.job_place import place_in_job
from ps_worker.__main__ import process_name
from ps_worker.transport.config import worker_config

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1"}  # fmt: skip
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "3", "PET_NODE_RANK": "1", "PET_NNODES": "3",
               "PET_NPROC_PER_NODE": "1"}  # fmt: skip
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
TRAINER = {"PET_NODE_RANK": "1", "PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "auto"}


@pytest.mark.parametrize(
    ("env", "rank", "world_size", "source"),
    [
        (TORCHRUN, 5, 8, "RANK and WORLD_SIZE of torchrun or an operator"),
        (PYTORCH_JOB, 1, 3, "RANK and WORLD_SIZE of torchrun or an operator"),
        (SRUN, 2, 4, "SLURM_PROCID and SLURM_NTASKS of Slurm"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, 0, 2,
         "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE of Open MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2, "PMI_RANK and PMI_SIZE of MPICH"),
        ({"JOB_COMPLETION_INDEX": "3"}, 3, 0, "JOB_COMPLETION_INDEX of an indexed Kubernetes Job"),
        (TRAINER, 1, 0, "PET_NODE_RANK of an operator"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, 1, 2, "PET_NODE_RANK of an operator"),
    ],
)  # fmt: skip
def test_a_launchers_variables_are_the_rank(
    env: dict[str, str], rank: int, world_size: int, source: str
) -> None:
    place = place_in_job(env)
    assert place is not None
    assert (place.rank, place.world_size, place.source) == (rank, world_size, source)
    settings = worker_config({"scheduler": "a:1"}, env)
    assert (settings.rank, settings.world_size) == (rank, world_size)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "senior"},  # nobody's who has no WORLD_SIZE
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "9"},  # a batch script itself
        {"LOCAL_RANK": "1"},
    ],
)
def test_what_is_no_place_in_a_job_is_none(env: dict[str, str]) -> None:
    assert place_in_job(env) is None
    assert worker_config({"scheduler": "a:1"}, env).rank is None


@pytest.mark.parametrize("machines", [SRUN, {"JOB_COMPLETION_INDEX": "1"}, TRAINER])
def test_under_torchrun_the_others_number_machines(machines: dict[str, str]) -> None:
    place = place_in_job(TORCHRUN | machines)
    assert place is not None
    assert place.rank == 5


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SRUN | {"RANK": "0", "WORLD_SIZE": "4"},
         r"rank 0 of 4 \(RANK .*\), and rank 2 of 4 \(SLURM_PROCID .*disagree; give rank=, --rank"),
        (SRUN | {"RANK": "2", "WORLD_SIZE": "8"}, r"rank 2 of 8 .*rank 2 of 4 .*disagree"),
        ({"RANK": "0", "WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"}, "disagree"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 of 4 processes; give rank=, --rank"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK is 'x'; expected a number of 0 or more; give"),
        ({"PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"}, "torchrun --no-python pushpull worker"),
    ],
)  # fmt: skip
def test_variables_that_disagree_are_refused_with_the_remedy(
    env: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        worker_config({"scheduler": "a:1"}, env)


@pytest.mark.parametrize(
    ("arguments", "env", "rank", "world_size"),
    [
        ({"rank": 1}, SRUN, 1, 0),
        ({}, SRUN | {"PUSHPULL_RANK": "3"}, 3, 0),
        ({"rank": 1}, {"PUSHPULL_RANK": "3"}, 1, 0),
        ({}, SRUN | {"PUSHPULL_WORLD_SIZE": "6"}, 2, 6),
        ({"world_size": 7}, SRUN, 2, 7),
        ({"rank": 0}, {"RANK": "x", "WORLD_SIZE": "y"}, 0, 0),  # not even looked at
        ({"role": "reader"}, SRUN, None, 0),
        ({}, SRUN | {"PUSHPULL_ROLE": "reader"}, None, 0),
        ({}, {"PUSHPULL_ROLE": "reader", "PUSHPULL_RANK": "3"}, None, 0),  # of a worker around it
    ],
)
def test_what_is_said_to_pushpull_goes_before_the_job(
    arguments: dict[str, object], env: dict[str, str], rank: int | None, world_size: int
) -> None:
    settings = worker_config({"scheduler": "a:1", **arguments}, env)
    assert (settings.rank, settings.world_size) == (rank, world_size)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "worker"),
        ({"PUSHPULL_RANK": "3"}, "worker-3"),
        (TORCHRUN, "worker-5"),
        ({"PUSHPULL_ROLE": "reader", "PUSHPULL_RANK": "3"}, "reader"),
    ],
)
def test_log_lines_have_a_workers_rank(env: dict[str, str], name: str) -> None:
    assert process_name({}, env) == name
