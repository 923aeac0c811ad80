"""The house's rules hold in every file, and each rule is seen to bite."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tidy.layers import PURE_ROOMS
from tests.tidy.rules import RULES
from tests.tidy.source import parse, python_sources

pytestmark = pytest.mark.slow

MAX_ROOM_FILES = 20


@pytest.mark.parametrize("name", RULES)
def test_rule_holds_everywhere(name: str) -> None:
    findings = [str(finding) for source in python_sources() for finding in RULES[name](source)]
    assert not findings, "\n" + "\n".join(findings)


def test_every_pure_room_exists() -> None:
    assert not PURE_ROOMS - {source.module for source in python_sources()}


def test_no_room_has_more_files_than_a_reader_takes_in() -> None:
    rooms = Counter(
        source.path.rpartition("/")[0] for source in python_sources() if source.is_shipped
    )
    assert not {room: count for room, count in rooms.items() if count > MAX_ROOM_FILES}


_LONG_FUNCTION = "def long() -> None:\n" + "    pass\n" * 70
_SEVEN = "def call(self, a, b, c, *, d, e, f, g): ..."

BAD = [
    ("layers", "ps_core/keys.py", "import time"),
    ("layers", "ps_core/keys.py", "from random import random"),
    ("layers", "ps_core/keys.py", "import torch"),
    ("layers", "ps_core/keys.py", "from ps_runtime.system.clock import now_s"),
    ("layers", "ps_server/ranges/range_machine.py", "def f():\n    import asyncio"),
    ("layers", "ps_server/ranges/range_machine.py", "from pushpull.v1 import types_pb2"),
    ("layers", "ps_server/ranges/range_machine.py", "from ps_server.service import node"),
    (
        "layers",
        "ps_server/ranges/range_machine.py",
        "from ps_server.service.servicer import ParameterServicer",
    ),
    ("layers", "ps_server/service/servicer.py", "from ps_server.__main__ import main"),
    ("layers", "ps_server/service/servicer.py", "from ps_worker import connect"),
    ("layers", "scheduler/edge/servicer.py", "import torch.nn"),
    ("layers", "ps_runtime/cluster/wire.py", "from scheduler.machine.cluster import Cluster"),
    ("layers", "ps_cli/train/up.py", "from scheduler import cluster"),
    ("layers", "ps_cli/train/up.py", "from ps_worker.transport.links import Link"),
    ("function_length", "ps_core/keys.py", _LONG_FUNCTION),
    ("file_length", "ps_core/keys.py", "x = 1\n" * 801),
    ("parameters", "ps_core/keys.py", _SEVEN),
    ("line_length", "ps_core/keys.py", "x = '" + "x" * 100 + "'"),
    ("names", "ps_core/utils.py", "x = 1"),
    ("names", "ps_core/keys.py", "class KeyManager: ..."),
    ("names", "ps_core/keys.py", "def key_helper(): ..."),
    ("names", "ps_core/keys.py", "def call(data): ..."),
    ("names", "ps_core/keys.py", "for epoch in (): ..."),
    ("names", "tests/unit/misc.py", "x = 1"),
    ("units", "ps_core/keys.py", "def wait(timeout: float | None): ..."),
    ("units", "ps_core/keys.py", "class C:\n    request_deadline: float"),
    ("marks", "ps_core/keys.py", "x = 1  # TO" + "DO later"),
    ("first_words", "ps_worker/client/client.py", 'def call():\n    """Whether it is."""'),
    ("glossary", "ps_worker/client/client.py", "is_newcomer = True"),
    ("glossary", "ps_worker/client/client.py", "def settle(): ..."),
    ("sleep", "tests/unit/test_keys.py", "import asyncio\nawait_me = asyncio.sleep(1)"),
    ("sleep", "tests/unit/test_keys.py", "from time import sleep\nsleep(1)"),
    ("fixed_ports", "tests/integration/test_up.py", "listen = 'localhost:5000'"),
    ("fixed_ports", "tests/integration/test_up.py", "listen = f'127.0.0.1:5000{1}'"),
    ("hidden_tests", "tests/unit/test_keys.py", "pytest.skip('no engine')"),
    ("hidden_tests", "tests/unit/test_keys.py", "@pytest.mark.xfail\ndef test_it(): ..."),
    ("hidden_tests", "tests/unit/test_keys.py", "grpc = pytest.importorskip('grpc')"),
    ("mocks", "tests/unit/test_keys.py", "from unittest.mock import MagicMock"),
    ("mocks", "tests/unit/test_keys.py", "from unittest import mock"),
    ("mocks", "tests/unit/test_keys.py", "monkeypatch.setattr(module, 'name', 1)"),
    ("pure_tests", "tests/unit/test_keys.py", "import subprocess"),
    (
        "deadlines",
        "ps_worker/transport/links.py",
        "async def f(stub):\n    await stub.RegisterNode(request)",
    ),
    ("invariants", "ps_core/keys.py", '"""Keys.\n\nKEY-1 holds."""\ncheck(False, "KEY-2", "no")'),
    ("invariants", "ps_core/keys.py", 'raise InvariantViolation("KEY-2", "no")'),
    ("equal_bits", "ps_server/rows/row_optimizers.py", "scale = 1 - beta**counts"),
    ("equal_bits", "ps_core/codecs/int8.py", "x = np.tanh(x)"),
    ("prints", "ps_server/service/servicer.py", "print('hello')"),
]

GOOD = [
    ("layers", "ps_core/keys.py", "from random import Random\nimport math, numpy"),
    (
        "layers",
        "ps_server/service/servicer.py",
        "import grpc, time\nfrom ps_server.ranges import memory",
    ),
    (
        "layers",
        "ps_cli/train/train.py",
        "import ps_worker as ps\nfrom ps_runtime.launch import launcher",
    ),
    ("names", "examples/digits_cnn.py", "for epoch in (): ..."),
    ("units", "ps_core/keys.py", "def wait(deadline_s: float): ..."),
    ("fixed_ports", "tests/integration/test_up.py", "listen = '127.0.0.1:0'"),
    (
        "deadlines",
        "ps_worker/transport/links.py",
        "call = stub.RegisterNode(request, timeout=deadline_s)",
    ),
    ("invariants", "ps_core/keys.py", '"""KEY-1 holds."""\ncheck(True, "KEY-1", "yes")'),
    ("equal_bits", "ps_server/rows/row_optimizers.py", "np.sqrt(2.0**-13 * math.pow(beta, n))"),
    ("equal_bits", "ps_worker/spec/settings.py", "np.exp(2.0**x)"),
    ("prints", "ps_cli/status.py", "print('hello')"),
    ("prints", "ps_runtime/settings/config.py", "def print_config(): print('hello')"),
]


@pytest.mark.parametrize(("name", "path", "text"), BAD)
def test_rule_bites(name: str, path: str, text: str) -> None:
    assert list(RULES[name](parse(path, text)))


@pytest.mark.parametrize(("name", "path", "text"), GOOD)
def test_rule_lets_pass(name: str, path: str, text: str) -> None:
    assert not list(RULES[name](parse(path, text)))


def test_every_rule_has_a_bad_snippet() -> None:
    assert {name for name, _, _ in BAD} == set(RULES)
