"""Checkpoints on S3: against a server process that speaks it, from this process and the tool's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import fsspec
import numpy as np
import pytest

import ps_worker as ps
from ps_core.errors import InvalidCheckpoint
from ps_runtime.checkpoint.directory import locate
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.reader import problems_of
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from tests.integration.command_line import ROOT, Tool, environment
from tests.unit.checkpoint_files import CLUSTER_ID, WEIGHTS, tensors_of, write_checkpoint

pytestmark = pytest.mark.timeout(120)

URL = "s3://bucket/runs/7"
FILE = "worker-0-7.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoints.s3_server"], cwd=ROOT, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()


@pytest.fixture(scope="module")
def variables(server: subprocess.Popen[str]) -> Mapping[str, str]:
    """What tells every client of S3 where it is and who asks."""
    assert server.stdout is not None
    return {
        "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "no_proxy": "127.0.0.1",
    }


@pytest.fixture
def store(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """An empty bucket's root."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    filesystem = locate(URL).filesystem
    if filesystem.exists("bucket"):
        filesystem.rm("bucket", recursive=True)
    filesystem.mkdir("bucket")
    return CheckpointStore(URL)


def test_a_cluster_keeps_them_there_and_starts_from_them(store: CheckpointStore) -> None:
    ones = np.ones(5_000, np.float32)

    def table(client: ps.Client) -> ps.TableHandle:
        return client.create_table("t", len(ones), optimizer=ps.Adam(lr=0.1), block_elements=64)

    with ps.local_cluster(2, 1, checkpoint_url=URL) as cluster, ps.connect(cluster.address) as one:
        for _ in range(3):
            one.push_pull(table(one), ones)
        one.attach_state("random", ps.RandomState())
        made = one.checkpoint("to a bucket").wait()
        expected = np.asarray(one.push_pull(table(one), ones))
    (name,) = store.names()
    assert made.url == f"{URL}/{name}"
    assert problems_of(store.named(name)) == []
    with ps.local_cluster(1, 1, resume=URL) as cluster, ps.connect(cluster.address) as one:
        one.attach_state("random", ps.RandomState())
        assert np.array_equal(np.asarray(one.push_pull(table(one), ones)), expected)


def test_what_has_not_changed_is_referred_to(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers write the second one, which needs the first; one server starts from both."""
    monkeypatch.setenv("PUSHPULL_CHECKPOINT_FULL_EVERY", "2")
    ones = np.ones(5_000, np.float32)

    def tables(client: ps.Client) -> list[ps.TableHandle]:
        optimizer = ps.Adam(lr=0.1)
        return [
            client.create_table(name, len(ones), optimizer=optimizer, block_elements=64)
            for name in ("trained", "sleeping")
        ]

    with ps.local_cluster(2, 1, checkpoint_url=URL) as cluster, ps.connect(cluster.address) as one:
        trained, sleeping = tables(one)
        one.push_pull(sleeping, ones)
        for _ in range(2):
            one.push_pull(trained, ones)
            one.checkpoint().wait()
        expected = [np.array(one.pull(table)) for table in (trained, sleeping)]
    first, second = map(store.named, store.names())
    manifest = second.read_manifest()
    assert manifest.bases == (store.names()[0],)
    assert manifest.referred_byte_count == 3 * 4 * len(ones), "values and both moments"
    assert first.read_manifest().is_full
    assert problems_of(second) == []
    with ps.local_cluster(1, 1, resume=URL) as cluster, ps.connect(cluster.address) as one:
        found = [np.asarray(one.pull(table)) for table in tables(one)]
        assert all(map(np.array_equal, found, expected))


def test_checkpoints_are_written_read_and_pruned(store: CheckpointStore, tmp_path: Path) -> None:
    assert (store.names(), store.next_number(), store.newest_good()) == ([], 1, None)
    for number in (1, 2):
        assert store.next_number() == number
        write_checkpoint(store.directory(number, CLUSTER_ID), number)
    with resolve(URL).reader as reader:
        assert reader.directory.url == f"{URL}/00000002-3fa9c1d2"
        expected = tensors_of(WEIGHTS, 2)["exp_avg"][64:128]
        assert reader.read(WEIGHTS.name, 1, "exp_avg") == expected.tobytes()
    for name in store.names():
        assert problems_of(store.named(name)) == []
    with pytest.raises(InvalidCheckpoint, match="is a checkpoint; expected a new directory"):
        store.directory(2, CLUSTER_ID).create()
    assert prune(store, 1) == ["00000001-3fa9c1d2"]
    assert store.names() == ["00000002-3fa9c1d2"]
    directory = store.directory(3, CLUSTER_ID)
    spooled = directory.begin("part", tmp_path)
    spooled.write_bytes(b"content")
    directory.commit("part", spooled)
    assert list(tmp_path.iterdir()) == []
    assert directory.location.names() == ["part"]


def test_what_another_process_changes_is_seen(store: CheckpointStore) -> None:
    """Listings are not taken from memory."""
    first = store.directory(1, CLUSTER_ID)
    manifest = write_checkpoint(first, 1)
    assert store.newest_good() is not None
    path = f"{first.location.path}/server-1.safetensors"
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    content = bytearray(other.cat_file(path))
    content[-1] ^= 1
    other.pipe_file(path, bytes(content))
    assert "server-1.safetensors: tensor" in problems_of(first)[0]
    other.pipe_file(path, bytes(content[:-1]))
    reason = f"has {len(content) - 1} bytes; the manifest says {len(content)}; no good one is under"
    with pytest.raises(InvalidCheckpoint, match=reason):
        store.open(manifest.directory)
    other.rm_file(path)
    with pytest.raises(InvalidCheckpoint, match=r"server-1.safetensors cannot be read"):
        store.open(manifest.directory)
    assert first.location.names() == ["manifest.json", "server-2.safetensors", FILE]
    other.rm_file(f"{first.location.path}/manifest.json")
    assert not first.has_manifest()
    with pytest.raises(InvalidCheckpoint, match=r"has no manifest.json: it was not completed"):
        resolve(first.url)
    assert store.next_number() == 2
    other.pipe_file(f"{store.location.path}/00000002-another/part", b"")
    assert store.next_number() == 3


def test_the_tool_reads_it(
    store: CheckpointStore, variables: Mapping[str, str], tmp_path: Path
) -> None:
    for number in (1, 2):
        write_checkpoint(store.directory(number, CLUSTER_ID), number)
    for command, expected in (
        (("list", URL), "00000002-3fa9c1d2"),
        (("verify", URL), f"{URL}/00000002-3fa9c1d2: good, "),
        (("export", URL, "model.safetensors"), "model.safetensors: 5 tensors"),
        (("prune", URL, "--keep", "1"), "removed 00000001-3fa9c1d2"),
    ):
        with Tool("checkpoint", *command, cwd=tmp_path, variables=variables) as tool:
            assert tool.end(60) == 0, tool.text
            assert expected in tool.text
    content = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["layer.weight"]["shape"] == [10, 14]


def test_a_bucket_that_is_not_there_is_named(store: CheckpointStore) -> None:
    elsewhere = CheckpointStore("s3://nobodys-bucket/root")
    with pytest.raises(InvalidCheckpoint, match=r"s3://nobodys-bucket/root has no good checkpoint"):
        resolve(elsewhere.url)


def test_a_server_that_is_gone_is_named(variables: Mapping[str, str], tmp_path: Path) -> None:
    gone = {**variables, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    with Tool("checkpoint", "list", URL, cwd=tmp_path, variables=gone) as tool:
        assert tool.end(60) == 1, tool.text
    assert f"pushpull: {URL} cannot be listed: Could not connect to the endpoint" in tool.text
    assert "Traceback" not in tool.text
