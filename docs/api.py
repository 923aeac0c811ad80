"""Makes docs/reference/API.md from the signatures and docstrings of `pushpull`.

`make reference`, or `python -m docs.api` in the repository root, writes it; a tidy test fails when
it is not what this script would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pushpull
from docs.reference import table
from pushpull import errors, jagged, types

PAGE = Path(__file__).resolve().parent / "reference/API.md"

GROUPS = {
    "Joining a cluster": ("connect", "Client", "local_cluster", "ray_cluster"),
    "Training a module": (
        "DistributedOptimizer",
        "DistributedSampler",
        "pull_model",
        "RandomState",
    ),
    "Embeddings": (
        "Embedding",
        "EmbeddingBag",
        "EmbeddingBagCollection",
        "HybridOptimizer",
        "prefetch",
    ),
    "Optimizers of the servers": (
        *("SGD", "Adam", "AdamW", "Adagrad", "RowwiseAdagrad", "FTRL", "RMSprop", "Aggregate"),
        *("Add", "Outer", "Custom", "Assign"),
    ),
    "Consistency": ("BSP", "SSP", "ASP"),
    "Initial values of a table": ("Zeros", "Constant", "Inline", "FromRank0", "Uniform", "Normal"),
    "Memory": ("empty_shared",),
}
"""Every public name, in the order of the page."""

BELOW = {
    *("check_sealed", "defaults", "kind", "of", "spec", "with_group"),
    *("parsed", "session", "wait_all"),
    *("begin_lookup", "end_lookup", "pooled"),
    *("check_groups", "step_scaled", "trained_model"),
}
"""Methods that the package itself calls. Scripts need none of them."""

HEAD = """# Python API

Made from the code by `make reference`; do not edit it. `help(ps.connect)` shows the same.

```python
import pushpull as ps
```

`pushpull` has the names below, [`pushpull.jagged`](#pushpulljagged) the batches of an
`EmbeddingBagCollection`, [`pushpull.types`](#pushpulltypes) the classes of what calls return, and
[`pushpull.errors`](#pushpullerrors) the errors. Settings from the environment and the commands
are on the [reference page](REFERENCE.md).
"""

_SECTION = re.compile(
    r"(Args|Options|Returns|Raises|Blocking|Shapes|Attributes)((?: \(.*\)|, [A-Z]\w+)*): ?(.*)"
)
_ENTRY = re.compile(r"(\w+)(?: \((.*?), (.*)\))?: (.*)")


def page() -> str:
    """The whole page."""
    listed = [name for names in GROUPS.values() for name in names]
    if sorted(listed) != sorted(pushpull.__all__):
        raise ValueError(
            f"GROUPS has other names than pushpull: {set(listed) ^ set(pushpull.__all__)}"
        )
    sections = [
        f"## {title}\n\n" + "\n".join(_described(pushpull, name) for name in names)
        for title, names in GROUPS.items()
    ]
    return "\n".join((HEAD, *sections, _classes(jagged), _classes(types), _errors()))


def _classes(module: ModuleType) -> str:
    head = f"## `{module.__name__}`\n\n" + markdown(module.__doc__) + "\n"
    return head + "\n".join(_described(module, name) for name in module.__all__)


def _errors() -> str:
    rows = [
        (f"`{name}`", inspect.cleandoc(getattr(errors, name).__doc__)) for name in errors.__all__
    ]
    head = "## `pushpull.errors`\n\n" + markdown(errors.__doc__) + "\n"
    return head + table(("error", "meaning"), rows)


def _described(module: ModuleType, name: str) -> str:
    """A function, or a class with its methods."""
    thing = getattr(module, name)
    is_made_by_users = module is not types and name != "Client"
    shown = f"{module.__name__.replace('pushpull', 'ps', 1)}.{name}"
    code = f"{_code(name, thing)}\n" if is_made_by_users else ""
    text = f"### `{shown}`\n\n{code}{markdown(thing.__doc__)}"
    if isinstance(thing, type):
        text += _fields(thing) if module is not pushpull else ""
        text += "".join(_members(thing))
    return text


def _fields(cls: type) -> str:
    """The fields of a dataclass, where its docstring does not say what they are."""
    if not dataclasses.is_dataclass(cls) or "Attributes:" in (cls.__doc__ or ""):
        return ""
    return "\n" + "".join(f"- `{f.name}` ({f.type})\n" for f in dataclasses.fields(cls))


def _members(cls: type) -> Iterator[str]:
    inherited = set(dir(_torch_optimizer())) if cls.__name__ == "DistributedOptimizer" else set()
    for name in _names_of(cls):
        value = inspect.getattr_static(cls, name)
        if name in inherited and name not in vars(cls):
            continue
        if isinstance(value, property):
            yield f"\n#### `.{name}`\n\n{markdown(value.fget.__doc__)}"
        if isinstance(value, classmethod):
            value = getattr(cls, name)
        if callable(value) and value.__doc__:
            yield f"\n#### `.{name}`\n\n{_code(name, value)}\n{markdown(value.__doc__)}"


def _names_of(cls: type) -> Iterator[str]:
    """Its public names, those of a base first, in the order in which they are written."""
    seen = set(BELOW)
    for base in reversed(cls.__mro__):
        if base.__module__.startswith(("ps_", "pushpull")):
            for name in vars(base):
                if not name.startswith("_") and name not in seen:
                    seen.add(name)
                    yield name


def _torch_optimizer() -> type:
    import torch

    return torch.optim.Optimizer


def _code(name: str, thing: Callable[..., Any]) -> str:
    """The call, one parameter a line where they are many."""
    signature = inspect.signature(thing)
    named = [
        each.replace(annotation=_bare(each.annotation))
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    returns = signature.empty if isinstance(thing, type) else _bare(signature.return_annotation)
    text = str(signature.replace(parameters=named, return_annotation=returns))
    if len(name + text) > 100:
        text = re.sub(r"^\(", "(\n    ", re.sub(r", (?=\*|/|\w+: )", ",\n    ", text))
        text = re.sub(r"\)( -> [^\n]*)?$", r",\n)\1", text)
    return f"```python\n{name}{text}\n```\n"


class _Bare(str):
    """An annotation without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) and annotation else annotation


def markdown(docstring: str | None) -> str:
    """A docstring of ours, in Google's style, as Markdown."""
    lines = inspect.cleandoc(docstring or "").split("\n")
    made: list[str] = []
    in_section = False
    for line in lines:
        section, entry = _SECTION.fullmatch(line), _ENTRY.fullmatch(line.strip())
        indent = len(line) - len(line.lstrip())
        if section is not None:
            in_section = True
            made += ["", f"**{section[1]}{section[2]}:** {section[3]}".rstrip(), ""][
                : 2 if section[3] else 3
            ]
        elif in_section and entry is not None and indent == 4:
            what = f" ({entry[2]}, default `{entry[3]}`)" if entry[2] else ""
            made.append(f"- `{entry[1]}`{what}: {entry[4]}")
        elif in_section and indent:
            made.append(("  " if indent > 4 else "") + line.strip())
        else:
            in_section = in_section and bool(line) is False
            made.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
