"""One cluster for all tests of bad input, and a pool of workers for those of a module: processes
take seconds to start.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ps_worker.client.local_cluster import local_cluster
from tests.integration.raw_lane import connected, offer_of
from tests.integration.raw_wire import (
    RawTable,
    RawWorker,
    Scene,
    Silent,
    Wire,
    payload,
)
from tests.integration.worker_pool import Pool, Workers


@pytest.fixture(scope="session")
def scene() -> Iterator[Scene]:
    with local_cluster(servers=2, workers=2) as cluster:
        wire = Wire(cluster.address)
        node_id, server = next(iter(wire.servers.items()))
        silent = Silent(server)
        with connected(offer_of(wire, wire.workers[0], node_id)) as stranger:
            yield Scene(wire, silent, stranger, cluster.process_ids)
        silent.release()
        wire.close()


@pytest.fixture
def wire(scene: Scene) -> Wire:
    return scene.wire


@pytest.fixture
def bad(wire: Wire) -> RawWorker:
    return wire.workers[0]


@pytest.fixture
def table(wire: Wire, request: pytest.FixtureRequest) -> Iterator[RawTable]:
    """A table after one step. What the test does to it must leave no trace, and step 2 follows."""
    made = wire.create(request.node.name[:150])
    wire.train(made)
    before = wire.values(made)
    assert before == {block: (1, 1, payload(-0.75)) for block in made.places}
    yield made
    assert wire.values(made) == before
    wire.train(made)
    assert wire.values(made) == {block: (2, 2, payload(-2.25)) for block in made.places}


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """`WORKERS` processes, as the module says, that have imported what it lists as `IMPORTED`."""
    made = Pool(request.module.WORKERS, getattr(request.module, "IMPORTED", ()))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def workers(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Workers]:
    """The pool, connected to two servers."""
    count = request.module.WORKERS
    with (
        local_cluster(servers=2, workers=count) as cluster,
        pool.connected(cluster.address, count) as connected,
    ):
        yield connected
