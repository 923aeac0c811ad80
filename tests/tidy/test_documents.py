"""What the pages say is what the code does: variables, metrics, errors, limits, links."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry

import pushpull
from docs import api, reference
from ps_cli.__main__ import app
from ps_core import limits
from ps_core.errors import CATALOGUE
from ps_runtime.grpc.errors import STATUS
from ps_runtime.settings.config import variable_name
from ps_runtime.settings.environment import VARIABLES
from pushpull.v1 import types_pb2
from tests.tidy.layers import PURE_ROOMS
from tests.tidy.source import PACKAGES, ROOT, files_under, python_sources

pytestmark = pytest.mark.slow

WRITTEN = (".md", ".yaml", ".yml", ".py", ".js", ".mjs", ".ts")

VARIABLE = re.compile(r"\bPUSHPULL_[A-Z0-9_]*[A-Z0-9]\b")
METRIC = re.compile(r"\bpushpull_(?:node|scheduler|server|worker)_[a-z_]*[a-z]\b")
EVENT = re.compile(r"\bevent=([a-z_]+)\b")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)]*)?\)")

MODULE = re.compile(
    r"(?<![\w./-])(?:ps_cli|ps_core|ps_runtime|ps_server|ps_worker)(?:\.\w+)+(?![\w/])"
)
FILE = re.compile(
    r"(?<![\w./-])(?:(?:ps_cli|ps_core|ps_runtime|ps_server|ps_worker|scheduler)/[\w/]+\.py|"
    r"tests/[\w/]+\.py)\b"
)

COMMAND = re.compile(r"(`?)\bpushpull ([a-z]+)\b(?! \d)(?: ([a-z]+))?")
"""A command in backticks, or, anywhere, two words, of which the first may be a group's name. With
a number behind it, it is the head of a file.
"""

JOINT = re.compile(r'" *\n *f?"')
"""Where a string goes on in the next line."""

SHOWN = re.compile(r"README\.md|docs/\w+/[A-Z_]+\.md|examples/|clients/.*\.md")
"""What a user reads."""

MADE_UP = re.compile(r"tests/(unit|tidy|integration)/|clients/")
"""Tests of refusals name variables that nobody reads; other languages' clients have their own."""


@cache
def texts() -> dict[str, str]:
    """Every text that mentions names of ours, by its path."""
    folders = (*PACKAGES, "tests", "docs", "examples", "deploy", "clients")
    inside = [path for folder in folders for path in files_under(ROOT / folder, *WRITTEN)]
    top = [path for path in ROOT.iterdir() if path.suffix in WRITTEN or path.name == "Dockerfile"]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in (*inside, *top)
    }


@cache
@cache
def code() -> str:
    """All shipped code in one text, the registries themselves left out."""
    registries = (
        "ps_runtime/settings/environment.py",
        "ps_runtime/observe/metrics.py",
        "ps_core/limits.py",
    )
    shipped = (source for source in python_sources() if source.is_shipped)
    return "\n".join(source.text for source in shipped if source.path not in registries)


def test_the_reference_page_is_what_the_code_says() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make reference`"


def test_the_api_page_is_what_the_code_says() -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "run `make reference`"


def test_pages_and_examples_use_the_public_api() -> None:
    public = {*pushpull.__all__, "errors", "jagged", "types", "__version__"}
    shown = {path: text for path, text in texts().items() if SHOWN.match(path)}
    assert {"README.md", "examples/digits_cnn.py", "docs/guides/CUSTOM_UPDATES.md"} <= shown.keys()
    behind = [path for path, text in shown.items() if "import ps_worker" in text]
    unknown = {
        (path, name)
        for path, text in shown.items()
        for name in re.findall(r"\bps\.(\w+)", text)
        if name not in public
    }
    assert not behind
    assert not unknown


def test_every_page_is_in_the_list_of_pages() -> None:
    index = texts()["docs/README.md"]
    pages = [path for path in texts() if re.match(r"docs/(?!adr/)\w+/[A-Z_]+\.md", path)]
    assert pages
    assert not [path for path in pages if f"({path.removeprefix('docs/')})" not in index]


def test_every_variable_mentioned_is_registered() -> None:
    unknown = {
        (path, name)
        for path, text in texts().items()
        for name in VARIABLE.findall(text)
        if name not in VARIABLES and not MADE_UP.match(path)
    }
    assert not unknown


def test_every_registered_variable_is_read() -> None:
    settings = {
        variable_name(field.name)
        for config in reference.ROLES.values()
        for field in dataclasses.fields(config)
    }
    text = code()
    unread = {name for name in VARIABLES if name not in settings and name not in text}
    assert not unread


def test_every_metric_mentioned_exists() -> None:
    known = metric_names()
    unknown = {
        (path, name)
        for path, text in texts().items()
        for name in METRIC.findall(text)
        if re.sub(r"_(bucket|sum|count)$", "", name) not in known and not MADE_UP.match(path)
    }
    assert not unknown


def test_every_event_mentioned_is_logged() -> None:
    known, gone = code(), re.compile(r"CHANGELOG\.md|tests/(unit|tidy)/")
    named = {
        (path, name)
        for path, text in texts().items()
        for name in EVENT.findall(text)
        if not gone.match(path)
    }
    assert len(named) > 50
    assert not {(path, name) for path, name in named if f'"{name}"' not in known}


def test_the_runbook_has_every_event_that_is_an_error() -> None:
    errors = {name for level, name in logged_events() if level == "error"}
    assert len(errors) > 10
    assert not errors - {*EVENT.findall(texts()["docs/guides/RUNBOOK.md"])}


def logged_events() -> set[tuple[str, str]]:
    """Levels and events of the log lines that the code names where it writes them."""
    return {
        (node.func.attr, name.value)
        for source in python_sources()
        if source.is_shipped
        for node in source.nodes
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "logs"
        for name in ast.walk(node.args[0])
        if isinstance(name, ast.Constant) and isinstance(name.value, str)
    }


def metric_names() -> set[str]:
    """Every metric, as /metrics names it."""
    registry = CollectorRegistry(auto_describe=True)
    for kind in reference.metric_classes():
        kind(registry)
    counters = {f"{metric.name}_total" for metric in registry.collect() if metric.type == "counter"}
    return counters | {metric.name for metric in registry.collect() if metric.type != "counter"}


def test_every_metric_is_measured() -> None:
    idle = {
        f"{kind.__name__}.{name}"
        for kind in reference.metric_classes()
        for name in vars(kind(CollectorRegistry()))
        if not re.search(rf"\.{name}\b", code()) and not re.search(rf"\.{name}\.set", watches())
    }
    assert not idle


@cache
def watches() -> str:
    """The metrics' own file, where some are asked at each scrape."""
    return (ROOT / "ps_runtime/observe/metrics.py").read_text(encoding="utf-8")


def test_errors_are_the_contracts_errors() -> None:
    names = {name.removeprefix("ERROR_CODE_") for name, _ in types_pb2.ErrorCode.items()}
    assert names - {"UNSPECIFIED"} == set(CATALOGUE) == set(STATUS)


def test_every_limit_is_kept_somewhere() -> None:
    relations = (ROOT / "ps_core/limits.py").read_text(encoding="utf-8")
    counts = Counter(re.findall(r"\w+", code() + relations))
    unused = {name for name in vars(limits) if name.isupper() and counts[name] < 2}
    assert not unused


def pages() -> Iterator[Path]:
    """Every Markdown page of ours."""
    yield from ROOT.glob("*.md")
    for folder in ("docs", "clients", "deploy", "examples"):
        yield from files_under(ROOT / folder, ".md")


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    dead = [target for target, _ in LINK.findall(text) if not (path.parent / target).exists()]
    assert not dead


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that an author wraps: neither tables nor code."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if not (is_code or is_fence or line.lstrip().startswith("|")):
            yield number, line


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_prose_end_before_column_120(path: Path) -> None:
    """A diff of a page shows what was said anew, not a paragraph of 400 columns."""
    assert not [f"{path}:{number}" for number, line in prose(path) if len(line) > 120]


@cache
def modules() -> dict[str, bool]:
    """Every module of ours by its dotted name, and whether it is a folder of others."""
    return {source.module: source.path.endswith("__init__.py") for source in python_sources()}


def is_there(dotted: str) -> bool:
    """Whether a name is a module of ours, or is in one."""
    parts = dotted.split(".")
    known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in modules()]
    found, rest = known[-1], parts[known[-1] :]
    owner = ".".join(parts[:found])
    return not rest or not modules()[owner] or hasattr(import_module(owner), rest[0])


@cache
def commands() -> dict[str, frozenset[str]]:
    """The commands of `pushpull`, each with those in its group, if it is one."""
    top: Any = typer.main.get_command(app)
    return {name: frozenset(getattr(each, "commands", ())) for name, each in top.commands.items()}


def commands_that_are_not(text: str) -> Iterator[str]:
    for found in COMMAND.finditer(JOINT.sub("", text)):
        is_code, first, second = found.groups()
        group = commands().get(first, frozenset())
        if (is_code and first not in commands()) or (group and second and second not in group):
            yield found.group()


def test_every_command_that_a_text_names_is_there() -> None:
    unknown = {
        (path, words)
        for path, text in texts().items()
        for words in commands_that_are_not(text)
        if path != "tests/tidy/test_documents.py"
    }
    assert not unknown


def test_every_module_that_a_text_names_is_there() -> None:
    unknown = {
        (path, name)
        for path, text in texts().items()
        for name in MODULE.findall(text)
        if not is_there(name) and path != "tests/tidy/test_documents.py"
    }
    assert not unknown


def test_every_file_that_a_text_names_is_there() -> None:
    unknown = {
        (path, name)
        for path, text in texts().items()
        for name in FILE.findall(text)
        if not (ROOT / name).exists() and not path.startswith("tests/tidy/")
    }
    assert not unknown


def test_made_up_names_are_seen() -> None:
    for text in (
        "`pushpull tidy`",
        "`pushpull runs tidy`",
        '"(pushpull checkpoint "\n    "restore)"',
    ):
        assert list(commands_that_are_not(text))
    assert not list(commands_that_are_not("`pushpull status`, pushpull runs list, pushpull is"))
    (gone,) = MODULE.findall("see `ps_server.nobody.knows`")
    assert not is_there(gone)
    assert is_there("ps_core.keys.KeyRange.of")
    assert FILE.findall("in `ps_server/nobody.py`") == ["ps_server/nobody.py"]
    assert VARIABLE.findall("set PUSHPULL_NONSENSE=1") == ["PUSHPULL_NONSENSE"]
    assert METRIC.findall("sum(pushpull_server_nonsense_total)") == [
        "pushpull_server_nonsense_total"
    ]
    assert LINK.findall("[a](b.md#c) [d](https://e)") == [("b.md", "#c")]


@pytest.mark.parametrize("package", ["scheduler", "ps_server", "ps_worker", "ps_runtime"])
def test_the_architecture_page_has_every_room_in_the_order_of_its_layers(package: str) -> None:
    """And a star for each that decides."""
    page = (ROOT / "docs/explanation/ARCHITECTURE.md").read_text(encoding="utf-8")
    table = page.partition(f"| `{package}` | what is in it |")[2].partition("\n\n")[0]
    cells = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    stars = dict(re.findall(r"`([\w/]+)`( ★)?", cells))
    rooms = [room for room in stars if "/" not in room]
    paths = [source.path.split("/") for source in python_sources() if source.package == package]
    assert sorted(rooms) == sorted({path[1] for path in paths if len(path) > 2})
    decide = {room for room in stars if f"{package}.{room}".replace("/", ".") in PURE_ROOMS}
    assert {room for room, star in stars.items() if star} == decide
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    (contract,) = (
        each for each in linted["importlinter"]["contracts"] if each.get("containers") == [package]
    )
    layers = [layer.split(" | ") for layer in contract["layers"]]
    order = [next(n for n, layer in enumerate(layers) if room in layer) for room in rooms]
    assert order == sorted(order), "the page says that its tables point down"
