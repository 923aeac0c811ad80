"""The Node client against live clusters, alone and beside a Python worker."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ps_worker as ps
from ps_worker.client.local_cluster import local_cluster

NODE_CLIENT = Path(__file__).resolve().parents[2] / "clients" / "node"
DEADLINE_S = 50.0
FEATURE_COUNT = 255
STEP_COUNT = 100
LEARNING_RATE = 0.5
LINE = np.array([((j * 37) % 11 - 5) / 5 for j in range(FEATURE_COUNT + 1)])

Vector = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def _installed() -> None:
    modules = NODE_CLIENT / "node_modules" / ".package-lock.json"
    assert modules.exists(), f"{modules} is missing: run `make system-deps`"


def _node(*arguments: str, scheduler: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["node", *arguments],
        cwd=NODE_CLIENT,
        env={**os.environ, "PUSHPULL_SCHEDULER": scheduler},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0, f"{output}\n{errors}"
    return output


def _scenarios() -> str:
    """One module that plays every scenario with one client and prints what each returned."""
    bodies = "\n".join(
        f"seen.{name} = await (async () => {{{body}}})();" for name, body in PLAYS.items()
    )
    return f"""
        import {{ PushpullClient, PushpullError }} from './src/index.js';
        const client = await PushpullClient.connect();
        const caught = (promise) => promise.then(() => null, (error) => error);
        const SGD = (lr) => ({{ kind: 'SGD', hyperparameters: {{ lr }} }});
        const seen = {{}};
        {bodies}
        await client.leave();
        console.log(JSON.stringify(seen));
    """


PLAYS = {
    "steps": """
        const table = await client.createTable({
          name: 'steps', tensors: [['a', [100]], ['b', [100]]], blockElements: 64,
          optimizer: SGD(0.5),
        });
        const ramp = Float32Array.from({ length: 200 }, (_, i) => i);
        const before = await client.pull(table);
        const first = await client.push(table, ramp);
        await client.push(table, ramp, { absent: ['b'], hyperparameters: { lr: 1 } });
        await client.skip(table);
        const after = await client.pull(table);
        return { first, before: [...before], after: [...after] };
    """,
    "element_types": """
        const found = {};
        for (const dtype of ['float64', 'float16', 'bfloat16']) {
          const table = await client.createTable({
            name: dtype, elementCount: 3, dtype, initializer: 'fromRankZero', optimizer: SGD(1),
          });
          await client.assign(table, [1, -2, 0.1]);
          const assigned = await client.pull(table);
          await client.push(table, [0.5, 0.5, 0]);
          found[dtype] = [[...assigned], [...await client.pull(table)]];
        }
        return found;
    """,
    "asynchronous": """
        const table = await client.createTable({
          name: 'asynchronous', elementCount: 100, blockElements: 64, consistency: 'asp',
          initializer: { constant: 3 }, optimizer: SGD(1),
        });
        const ones = new Float32Array(100).fill(1);
        await Promise.all([1, 2, 3].map(() => client.push(table, ones)));
        return [...new Set(await client.pull(table))];
    """,
    "errors": """
        const spec = { name: 'errors', elementCount: 200, blockElements: 64, optimizer: SGD(1) };
        const table = await client.createTable(spec);
        const ones = new Float32Array(200).fill(1);
        const errors = [
          await caught(client.createTable({ ...spec, elementCount: 201 })),
          await caught(client.push(table, new Float32Array(200).fill(NaN))),
          await caught(client.push(table, ones, { hyperparameters: { beta1: 0 } })),
          await caught(client.pull(table, { clock: 9, deadlineMs: 100 })),
          await caught(client.pull(table, { clock: 0, consistent: true })),
          await caught(PushpullClient.connect(undefined, { rank: 0 })),
        ];
        const given = await client.createTable({
          ...spec, name: 'given', initializer: 'fromRankZero',
        });
        const wrong = new Float32Array(200).fill(2);
        wrong[70] = NaN;
        errors.push(await caught(client.assign(given, wrong)));
        await client.assign(given, ones);
        const { applied } = await client.push(table, ones);
        return {
          codes: errors.map((error) => error instanceof PushpullError && error.code),
          clock: errors[4].clock,
          applied,
          values: [...new Set(await client.pull(table))],
          given: [...new Set(await client.pull(given))],
        };
    """,
    "reader": """
        const reader = await PushpullClient.connect(undefined, { role: 'reader' });
        const table = await client.createTable({
          name: 'read', elementCount: 1000, blockElements: 64, optimizer: SGD(1),
        });
        const opened = await reader.table('read');
        const reading = reader.pull(opened, { clock: 2, consistent: true });
        for (let step = 0; step < 5; step += 1) await client.push(table, new Array(1000).fill(-1));
        const values = await reading;
        const refused = await caught(reader.push(opened, values));
        reader.close();
        return { values: [...new Set(values)], code: refused.code };
    """,
}
"""What one Node client does on a cluster of two servers; what it returns is checked below."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    with local_cluster(servers=2, workers=1) as cluster:
        process = _node("--input-type=module", "--eval", _scenarios(), scheduler=cluster.address)
        found: dict[str, Any] = json.loads(_output(process).splitlines()[-1])
        return found


@pytest.mark.parametrize("script", ["test", "check"])
def test_its_own_tests_and_types(script: str) -> None:
    result = subprocess.run(
        ["npm", "run", "--silent", script],
        cwd=NODE_CLIENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def _gradient(parameters: Vector, x: Vector, y: Vector) -> Vector:
    gradient: Vector = x.T @ (x @ parameters - y) / len(y)
    return gradient


def _train_in_python(address: str, gate_bytes: int) -> bytes:
    generator = np.random.default_rng(7)
    x = generator.normal(size=(512, FEATURE_COUNT + 1))
    x[:, -1] = 1.0
    y = x @ LINE
    with ps.connect(address, rank=0) as client:
        table = client.create_table(
            "line",
            [("weight", (1, FEATURE_COUNT)), ("bias", (1,))],
            optimizer=ps.SGD(lr=LEARNING_RATE),
            block_elements=64,
            gate_bytes=gate_bytes,
        )
        for _ in range(STEP_COUNT):
            parameters = _flat(client.pull(table))
            gradient = _gradient(parameters.astype(np.float64), x, y)
            client.wait(client.push(table, gradient.astype(np.float32)))
        return _flat(client.pull(table)).tobytes()


def _flat(values: Any) -> npt.NDArray[np.float32]:
    if isinstance(values, Mapping):
        values = np.concatenate([np.ravel(value) for value in values.values()])
    return np.ravel(np.asarray(values, dtype=np.float32))


@pytest.mark.parametrize(
    "gate_bytes",
    [
        pytest.param(0, id="roomy"),
        pytest.param(1, id="smallest-gate", marks=pytest.mark.thorough),
    ],
)
def test_it_trains_beside_a_python_worker(gate_bytes: int) -> None:
    with local_cluster(servers=2, workers=2) as cluster:
        node = _node(
            "examples/linear_regression.js",
            f"--steps={STEP_COUNT}",
            f"--lr={LEARNING_RATE}",
            f"--gate-bytes={gate_bytes}",
            "--rank=1",
            "--print-parameters",
            scheduler=cluster.address,
        )
        try:
            python_parameters = _train_in_python(cluster.address, gate_bytes)
        except BaseException:
            node.kill()
            raise
        node_parameters = bytes.fromhex(_output(node).splitlines()[-1])
    assert node_parameters == python_parameters
    found = np.frombuffer(python_parameters, np.float32)
    np.testing.assert_allclose(found, LINE, atol=1e-3)


def test_steps_and_pulls(seen: dict[str, Any]) -> None:
    found, ramp = seen["steps"], np.arange(200, dtype=np.float64)
    assert found["first"] == {"clock": 1, "applied": True, "staleness": 0}
    assert found["before"] == [0.0] * 200
    expected = -0.5 * ramp - np.where(ramp < 100, ramp, 0.0)
    assert found["after"] == expected.tolist()


def test_element_types(seen: dict[str, Any]) -> None:
    tenth = {"float64": 0.1, "float16": 0.0999755859375, "bfloat16": 0.10009765625}
    assert seen["element_types"] == {
        dtype: [[1.0, -2.0, value], [0.5, -2.5, value]] for dtype, value in tenth.items()
    }


def test_asynchronous_steps_at_once(seen: dict[str, Any]) -> None:
    assert seen["asynchronous"] == [0.0]


def test_errors_are_those_of_the_catalogue_and_harm_nothing(seen: dict[str, Any]) -> None:
    found = seen["errors"]
    assert found["codes"] == [
        "TABLE_EXISTS",
        "INVALID_TENSOR",
        "INVALID_CONFIG",
        "WAIT_EXPIRED",
        "ALREADY_PAST",
        "INVALID_CONFIG",
        "INVALID_TENSOR",
    ]
    assert found["given"] == [1.0]
    assert (found["clock"], found["applied"], found["values"]) == (2, True, [-1.0])


def test_a_reader_sees_one_state_of_the_whole_table(seen: dict[str, Any]) -> None:
    assert seen["reader"] == {"values": [2.0], "code": "NOT_PERMITTED"}


def _played(body: str, address: str) -> subprocess.Popen[str]:
    """A Node worker that makes tables, prints what `body` returns, and leaves."""
    script = f"""
        import {{ PushpullClient }} from './src/index.js';
        const client = await PushpullClient.connect();
        const tables = [];
        for (const name of ['counted', 'unused']) {{
          tables.push(await client.createTable({{
            name, elementCount: 200, blockElements: 64, reduction: 'sum',
            optimizer: {{ kind: 'SGD', hyperparameters: {{ lr: 1 }} }},
          }}));
        }}
        const table = tables[0];
        const found = await (async () => {{{body}}})();
        await client.leave();
        console.log(JSON.stringify(found));
    """
    return _node("--input-type=module", "--eval", script, scheduler=address)


ONE_STEP = """
    const before = await client.pull(table);
    const { clock } = await client.push(table, new Array(200).fill(1));
    return [before[0], clock, (await client.pull(table))[0]];
"""


def _counted(client: ps.Client, name: str = "counted") -> ps.TableHandle:
    return client.create_table(
        name, 200, optimizer=ps.SGD(lr=1.0), reduction="sum", block_elements=64
    )


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """It leaves the other table in order, too, which it does not use."""
    root = str(tmp_path / "checkpoints")
    ones = np.ones(200, np.float32)
    with (
        local_cluster(servers=2, checkpoint_url=root) as cluster,
        ps.connect(cluster.address) as client,
    ):
        for _ in range(3):
            for name in ("counted", "unused"):
                client.wait(client.push(_counted(client, name), ones))
        client.checkpoint().wait()
    with local_cluster(servers=2, resume=root) as cluster:
        output = _output(_played(ONE_STEP, cluster.address))
    assert json.loads(output) == [-3.0, 4, -4.0]


def test_it_takes_the_place_of_a_worker_that_is_gone() -> None:
    ones = np.ones(200, np.float32)
    with local_cluster(servers=2, workers=2) as cluster, ps.connect(cluster.address) as client:
        other = ps.connect(cluster.address)
        tables = [_counted(client), _counted(other)]
        for _ in range(2):
            tickets = [c.push(t, ones) for c, t in zip([client, other], tables, strict=True)]
            for each, ticket in zip([client, other], tickets, strict=True):
                each.wait(ticket)
        other.abandon("to be replaced")
        client.wait(client.push(tables[0], ones))
        node = _played(ONE_STEP, cluster.address)
        view = client.tables.await_view(
            lambda view: bool(view.tables[0].joins), "the Node worker to join", DEADLINE_S
        )
        joined = view.tables[0].joins[-1].after_clock
        while tables[0].clock <= joined:
            client.wait(client.push(tables[0], ones))
        output = _output(node)
    at_first = -float(joined + 2)  # of the first two steps there were two each
    assert json.loads(output) == [at_first, joined + 1, at_first - 2]
