"""A run that is stopped and goes on, from files, on other servers: as if it had never stopped."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ps_worker as ps
from ps_core.manifest import SavedWorker
from ps_runtime.checkpoint.store import resolve
from ps_runtime.launch.cluster_shape import CheckpointPlan
from tests.file_limits import no_file_above
from tests.integration.replicated_cluster import replicated_cluster
from tests.integration.resumed_training import (
    DEADLINE_S,
    Recipe,
    all_state,
    together,
    train,
)

pytestmark = pytest.mark.slow

END = 12


def amsgrad() -> Any:
    return ps.AdamW(lr=1e-2, amsgrad=True)


def trained_models(root: Path, recipe: Recipe, workers: int = 2) -> list[Any]:
    with ps.local_cluster(1, workers) as cluster:
        return together(cluster.address, workers, lambda c: train(c, recipe, END), recipe.lane)


@pytest.mark.timeout(180)  # four clusters, one after the other
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"push_codec": "int8", "pull_codec": "bf16"}, marks=pytest.mark.thorough),
        pytest.param(
            {"push_codec": "topk:0.1:6", "pull_codec": "bf16"}, marks=pytest.mark.thorough
        ),
        pytest.param({"push_codec": "lowrank:2", "pull_codec": "bf16"}, marks=pytest.mark.thorough),
        pytest.param({"buffers": None}, marks=pytest.mark.thorough),
    ],
    ids=["whole", "int8", "topk", "lowrank", "own buffers"],
)
def test_bsp_goes_on_bit_for_bit_on_other_servers(tmp_path: Path, options: dict[str, Any]) -> None:
    """With a codec, what is to be pushed later is in the workers' own states."""
    recipe = Recipe(amsgrad, lane="shm", options=options)
    check_bsp_goes_on(tmp_path, recipe, are_equal="buffers" not in options)


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("synchronizes", [False, True])
def test_parameters_that_show_what_is_left_go_on_bit_for_bit(
    tmp_path: Path, *, synchronizes: bool
) -> None:
    """`Add`: each worker's own have its updates that have not left, but after `synchronize`."""
    moved = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    options = {"push_codec": "topk:0.1", "pull_codec": "bf16"}
    recipe = Recipe(lambda: ps.Add(moved), options=options, synchronizes=synchronizes)
    check_bsp_goes_on(tmp_path, recipe, are_equal=synchronizes)


def check_bsp_goes_on(tmp_path: Path, recipe: Recipe, *, are_equal: bool = True) -> None:
    """One server, then three, then two: as one run that was never stopped.

    Args:
        are_equal: all workers have one model.
    """
    expected = trained_models(tmp_path, recipe)
    root = str(tmp_path / "checkpoints")
    for servers, resume, begin, end in ((1, "", 4, 5), (3, root, 8, 9), (2, root, 0, END)):
        recipe.made.clear()
        work = functools.partial(train, recipe=recipe, until=end, save_at=begin)
        with ps.local_cluster(servers, 2, checkpoint_url=root, resume=resume) as cluster:
            models = together(cluster.address, 2, work, recipe.lane)
        assert [made.url for made in recipe.made] == [made.url for made in recipe.made[:1]] * (
            2 if begin else 0
        ), "both asked for one, and have the same"
        if begin:
            with resolve(root).reader as reader:
                assert {t.clock for t in reader.manifest.tables} == {begin}
                saved = [(w.rank, w.clock, bool(w.file)) for w in reader.manifest.workers]
                assert saved == [(rank, begin, True) for rank in range(2)]
                assert not any(table.is_torn for table in reader.manifest.tables)
                assert len(reader.manifest.parts) == servers
    for uninterrupted, resumed in zip(expected, models, strict=True):
        for name, (before, after) in all_state([uninterrupted, resumed]):
            assert torch.equal(before, after), name
    if are_equal:
        for name, tensors in all_state(models):
            assert all(torch.equal(tensors[0], each) for each in tensors), name


@pytest.mark.thorough
def test_a_resume_without_feedback_says_that_it_drops_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another codec with feedback goes on from it."""
    root, left = str(tmp_path), []
    for codec, resume in (("int8", ""), ("sign", root), ("none", root)):
        with (
            ps.local_cluster(1, 1, checkpoint_url=root, resume=resume) as cluster,
            ps.connect(cluster.address, push_codec=codec) as client,
        ):
            torch.manual_seed(5)
            model = torch.nn.Linear(8, 8)
            optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="model")
            (table,) = client.tables.handles
            residuals = table.steps.residuals
            if codec == "none":
                assert residuals is None
                assert "residuals_dropped" in caplog.text
                assert f"table={table.name}" in caplog.text
                continue
            assert residuals is not None
            left.append(residuals.state_dict()["residuals"])
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            left.append(residuals.state_dict()["residuals"])
            client.checkpoint().wait()
        assert "residuals_dropped" not in caplog.text
    nothing, after_int8, before_sign, after_sign = left
    assert not nothing.any()
    assert after_int8.any()
    assert torch.equal(after_int8, before_sign)
    assert not torch.equal(before_sign, after_sign)


def test_who_joins_after_a_resume_leaves_in_order_what_it_has_not_opened(tmp_path: Path) -> None:
    """Its last seal was for the checkpoint's clock: the others had gone on, and it was an error."""
    root, ones = str(tmp_path), np.ones(8, np.float32)

    def step(client: ps.Client, count: int) -> None:
        table = client.create_table("left", 8, optimizer=ps.SGD(lr=1.0), consistency="asp")
        for _ in range(count):
            client.push_pull(table, ones)

    with (
        ps.local_cluster(1, 1, checkpoint_url=root) as cluster,
        ps.connect(cluster.address) as client,
    ):
        step(client, 1)
        client.checkpoint().wait()
    with (
        replicated_cluster(
            1, 1, replica_count=1, max_workers=2, checkpoints=CheckpointPlan(resume=root)
        ) as resumed,
        ps.connect(resumed.address, rank=0) as client,
    ):
        step(client, 3)
        with ps.connect(resumed.address) as late:
            assert late.is_late_joiner


@pytest.mark.thorough
def test_a_resume_with_fewer_workers_keeps_what_the_others_codecs_have_left(tmp_path: Path) -> None:
    root = str(tmp_path)

    def left(client: ps.Client) -> torch.Tensor:
        torch.manual_seed(5)
        model = torch.nn.Linear(8, 8)
        optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="model")
        if not client.restored_from:
            (model(torch.ones(2, 8)).square().sum() * (client.rank + 1)).backward()
            optimizer.step()
            client.checkpoint().wait()
        (table,) = client.tables.handles
        assert table.steps.residuals is not None
        found: torch.Tensor = table.steps.residuals.state_dict()["residuals"]
        client.barrier()  # the parts of a mean are of those who have not left
        return found

    def of(count: int, resume: str) -> list[torch.Tensor]:
        with ps.local_cluster(1, count, checkpoint_url=root, resume=resume) as cluster:
            return together(cluster.address, count, left, push_codec="int8")

    before = of(3, "")
    first, second = of(2, root)
    assert before[2].any()
    torch.testing.assert_close(first, (before[0] + before[2]) * (2 / 3))
    torch.testing.assert_close(second, before[1] * (2 / 3))  # a half of it is now a third of before


@pytest.mark.thorough
@pytest.mark.parametrize("codec", ["none", "sign"])
def test_a_worker_without_feedback_says_that_it_drops_what_absent_ones_had_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str
) -> None:
    """The codec is each worker's own."""
    root = str(tmp_path)

    def train(client: ps.Client) -> None:
        options: Any = {"push_codec": "int8" if client.rank else codec}
        model = torch.nn.Linear(8, 8)
        optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="m", **options)
        if not client.restored_from:
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            client.checkpoint().wait()

    for count, resume in ((3, ""), (3, root), (1, root)):
        assert "residuals_dropped" not in caplog.text
        with ps.local_cluster(1, count, checkpoint_url=root, resume=resume) as cluster:
            together(cluster.address, count, train)
    told = [r.message for r in caplog.records if "residuals_dropped" in r.message]
    assert len(told) == (codec == "none")
    for each in told:
        assert "table=m/0/float32" in each
        assert 'ranks="1,2"' in each or "ranks=1,2" in each


class Counted:
    """What some workers have of a count."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count} if self.count else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state.get("count", 0)


class Summed(Counted):
    def take_over(self, state: dict[str, int]) -> None:
        self.count += state["count"]


@pytest.mark.thorough
def test_fewer_workers_take_over_the_states_of_the_others_or_say_what_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path)

    def counts(client: ps.Client) -> tuple[int, ...]:
        first = 0 if client.restored_from else client.rank
        states = {"summed": Summed(first), "plain": Counted(first), "none": Counted(0)}
        for name, state in states.items():
            client.attach_state(name, state, per_rank=True)
        if not client.restored_from:
            client.create_table("any", 4, optimizer=ps.SGD(lr=1.0))
            client.checkpoint().wait()
        return tuple(state.count for state in states.values())

    with ps.local_cluster(1, 4, checkpoint_url=root) as cluster:
        together(cluster.address, 4, counts)
    with ps.local_cluster(1, 4, resume=root) as cluster:
        assert together(cluster.address, 4, counts)[3] == (3, 3, 0)
    assert "state_of_absent_workers_dropped" not in caplog.text
    with ps.local_cluster(1, 2, resume=root) as cluster:
        assert together(cluster.address, 2, counts) == [(0 + 2 + 3, 0, 0), (1, 1, 0)]
    (told,) = [r.message for r in caplog.records if "absent_workers" in r.message]
    assert "name=plain" in told
    assert 'ranks="2,3"' in told or "ranks=2,3" in told
    assert "resume with 4 workers" in told


COUNT, BLOCK = 5_000, 64


def counting_table(client: ps.Client, consistency: str) -> ps.TableHandle:
    """A table in which each step of each worker takes 1 from every element."""
    return client.create_table(
        "counted", COUNT, optimizer=ps.SGD(lr=1.0), consistency=consistency, reduction="sum",
        block_elements=BLOCK,
    )  # fmt: skip


def counts_of(root: Path | str) -> tuple[dict[int, np.ndarray[Any, Any]], Any]:
    with resolve(str(root)).reader as reader:
        table = reader.manifest.table("counted")
        blocks = {
            block: np.frombuffer(reader.read("counted", block), np.float32)
            for block in range(table.block_count)
        }
    return blocks, table


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["bsp", "ssp:3"])
def test_the_cut_of_a_table_that_is_trained(tmp_path: Path, consistency: str) -> None:
    check_cut(tmp_path, consistency)


def check_cut(tmp_path: Path, consistency: str) -> None:
    """Checkpoints while workers of different speed step: under BSP and SSP each has exactly what it
    says, in every range; under ASP each range is between two updates.
    """
    root = tmp_path / "checkpoints"
    stop = threading.Event()
    gradient = np.ones(COUNT, np.float32)

    def work(client: ps.Client) -> int:
        table = counting_table(client, consistency)
        while not stop.is_set() or (client.rank and table.clock < 30):
            client.push_pull(table, gradient)
            if client.rank == 0:
                stop.wait(0.002)
        return table.clock

    def look(address: str) -> list[str]:
        with ps.connect(address, role="reader", request_deadline_s=DEADLINE_S) as reader:
            reader.table("counted")
        with ps.connect(address, role="operator", request_deadline_s=DEADLINE_S) as client:
            made = [client.checkpoint(f"number {n}").wait() for n in range(4)]
        stop.set()
        return [each.url for each in made]

    with ps.local_cluster(2, 3, checkpoint_url=str(root)) as cluster:
        found: list[list[str]] = []
        looking = threading.Thread(target=lambda: found.append(look(cluster.address)))
        looking.start()
        together(cluster.address, 3, work)
        looking.join(DEADLINE_S)
    (urls,) = found
    assert len(set(urls)) == 4
    for url in urls:
        blocks, table = counts_of(url)
        assert table.is_torn == (consistency == "asp")
        for block, values in blocks.items():
            assert len(np.unique(values)) == 1, f"block {block} is torn"
            if consistency in ("bsp", "ssp:3"):
                assert values[0] == -3 * table.clock, f"block {block} of {url}"
        if consistency == "bsp:backup=1":
            assert {values[0] for values in blocks.values()} == {-2 * table.clock}


@pytest.mark.thorough
def test_it_goes_on_with_more_workers(tmp_path: Path) -> None:
    check_other_workers(tmp_path, "ssp:2", 3)


def check_other_workers(tmp_path: Path, consistency: str, workers: int) -> None:
    """Two workers begin; so many go on."""
    root = str(tmp_path / "checkpoints")
    gradient = np.ones(COUNT, np.float32)

    def begin(client: ps.Client) -> None:
        table = counting_table(client, consistency)
        for _ in range(5):
            client.push_pull(table, gradient)
        client.checkpoint().wait()

    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster:
        together(cluster.address, 2, begin)
    blocks, saved = counts_of(root)
    at_cut = np.concatenate([blocks[number] for number in sorted(blocks)])
    assert saved.clock == 5

    def go_on(client: ps.Client) -> tuple[int, Any]:
        table = counting_table(client, consistency)
        assert table.clock == 5
        found = client.pull(table)
        assert np.array_equal(np.asarray(found), at_cut) or consistency != "bsp"
        for _ in range(4):
            client.push_pull(table, gradient)
        return table.clock, None

    with ps.local_cluster(2, workers, resume=root) as cluster:
        assert {clock for clock, _ in together(cluster.address, workers, go_on)} == {9}
        with ps.connect(cluster.address, role="reader") as client:
            end = np.asarray(client.pull(client.table("counted")))
    assert np.array_equal(end, at_cut - 4 * workers)


@pytest.mark.thorough
def test_where_it_cannot_be_written_training_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(root)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        table = counting_table(client, "bsp")
        root.rmdir()  # it was made at the start, to see that it can be
        root.write_text("a file is where the directory should be")
        client.push_pull(table, np.ones(COUNT, np.float32))
        with pytest.raises(ps.InvalidCheckpoint, match=r"Not a directory|File exists"):
            client.checkpoint().wait()
        client.push_pull(table, np.ones(COUNT, np.float32))
        root.unlink()
        made = client.checkpoint().wait()
    assert counts_of(made.url)[1].clock == 2


def stepped(client: ps.Client, name: str = "model") -> Callable[[], None]:
    """A step of a model whose parameters the worker has."""
    model = torch.nn.Linear(256, 256, bias=False)
    aggregate = ps.Aggregate(functools.partial(torch.optim.SGD, lr=1.0))
    optimizer = ps.DistributedOptimizer(client, model, aggregate, name=name)

    def step() -> None:
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()

    return step


def test_none_is_complete_without_the_model_and_none_goes_on_without_it(tmp_path: Path) -> None:
    """Its worker has it, and a full disk from its second step on; the server's disk has room."""
    root = tmp_path / "checkpoints"
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(root)) as cluster,
        ps.connect(cluster.address, role="operator") as operator,
    ):
        with ps.connect(cluster.address) as client:
            step = stepped(client)
            step()
            whole = client.checkpoint().wait()
            step()
            with no_file_above(100_000):
                with pytest.raises(ps.InvalidCheckpoint, match=r"worker 0: .*File too large"):
                    client.checkpoint().wait()
                step()
                client.close()
        with pytest.raises(ps.InvalidCheckpoint, match=r"no worker's state .*File too large"):
            operator.checkpoint().wait()
        with resolve(str(root)).reader as reader:
            assert reader.directory.url == whole.url
            lost = replace(reader.manifest, workers=(SavedWorker(0, 1, problem="it died"),))
            reader.directory.write_manifest(lost)  # as a version before this rule made them
        operator.restore(whole.url).close()
        with ps.connect(cluster.address) as client:
            with pytest.raises(ps.InvalidCheckpoint, match=r"lacks the parameters of 'optimizer/m"):
                stepped(client)
            stepped(client, "another")


def made_checkpoints(root: Path, count: int) -> list[str]:
    """So many checkpoints, each a step further."""
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(root)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        table, urls = counting_table(client, "bsp"), []
        for _ in range(count):
            client.push_pull(table, np.ones(COUNT, np.float32))
            urls.append(client.checkpoint().wait().url)
    return urls


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three; what a test damages is a copy."""
    root = tmp_path_factory.mktemp("three") / "checkpoints"
    made_checkpoints(root, 3)
    return root


@pytest.fixture
def root(three_checkpoints: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three_checkpoints, tmp_path / "checkpoints")


@pytest.mark.thorough
def test_a_bad_one_is_passed_over_for_the_newest_good_one(root: Path) -> None:
    _, good, bad = sorted(path for path in root.iterdir() if path.is_dir())
    (part,) = bad.glob("server-*")
    part.write_bytes(part.read_bytes()[:-1])
    with ps.local_cluster(2, 1, resume=str(root)) as cluster, ps.connect(cluster.address) as client:
        assert client.restored_from == str(good)
        assert counting_table(client, "bsp").clock == 2
    with pytest.raises(ps.Recovering, match=rf"{part.name}.*\n?.*{good.name}"):
        ps.local_cluster(1, 1, resume=str(bad))


def test_values_that_are_damaged_are_never_trained_on(root: Path) -> None:
    url = min(path for path in root.iterdir() if path.is_dir())
    (part,) = url.glob("server-*")
    content = bytearray(part.read_bytes())
    content[-5] ^= 1  # of a value: only who reads all of it sees that
    part.write_bytes(content)
    with (
        ps.local_cluster(1, 1, resume=str(url)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        table = counting_table(client, "bsp")
        with pytest.raises(ps.UpdateFailed, match=rf"{part.name}.*CRC"):
            client.pull(table, timeout_s=DEADLINE_S)
        client.close(leave=False)


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_the_last_checkpoint_has_what_workers_had_that_have_left(
    tmp_path: Path, consistency: str
) -> None:
    """Two runs, each with a checkpoint when its workers have left: under BSP as one that was never
    stopped.
    """
    recipe = Recipe(amsgrad, consistency)
    root = tmp_path / "checkpoints"
    models: list[Any] = []
    for servers, resume, end in ((1, "", 5), (3, str(root), END)):
        work = functools.partial(train, recipe=recipe, until=end)
        with ps.local_cluster(servers, 2, checkpoint_url=str(root), resume=resume) as cluster:
            models = together(cluster.address, 2, work)
            with ps.connect(cluster.address, role="operator") as client:
                made = client.checkpoint("the end").wait(DEADLINE_S)
        with resolve(made.url).reader as reader:
            assert {t.clock for t in reader.manifest.tables} == {end} or consistency == "asp"
            saved = [(w.rank, w.clock, bool(w.file)) for w in reader.manifest.workers]
            assert saved == [(rank, end, True) for rank in range(2)]
        assert [path.name for path in root.iterdir() if not path.name.startswith("0")] == []
    if consistency == "bsp":
        for name, tensors in all_state([*trained_models(tmp_path, recipe), *models]):
            assert all(torch.equal(tensors[0], each) for each in tensors), name


@pytest.mark.thorough
def test_a_worker_that_gets_no_batch_after_a_resume_keeps_its_state(tmp_path: Path) -> None:
    """It loads everything, takes no step and leaves; the other goes on."""
    recipe = Recipe(amsgrad, "asp", options={"push_codec": "int8"})
    root = tmp_path / "checkpoints"
    for resume, ends in (("", (5, 5)), (str(root), (9, 0))):

        def work(client: ps.Client, ends: tuple[int, int] = ends) -> None:
            train(client, recipe, ends[client.rank])

        with ps.local_cluster(1, 2, checkpoint_url=str(root), resume=resume) as cluster:
            together(cluster.address, 2, work)
            with ps.connect(cluster.address, role="operator") as client:
                made = client.checkpoint("the end").wait(DEADLINE_S)
    with resolve(made.url).reader as reader:
        assert [(w.rank, w.clock, bool(w.file)) for w in reader.manifest.workers] == [
            (0, 9, True),
            (1, 5, True),
        ]
        (own,) = (
            header.worker
            for header in reader.headers.values()
            if header.worker and header.worker.rank
        )
        assert own.state["position"]["seen"] == 40
