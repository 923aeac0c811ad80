"""FRAMEWORKS.md: what it shows is in the examples, which run, learn, and go on from their own
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ps_worker as ps
from tests.integration.command_line import Tool
from tests.integration.framework_jobs import IMPORTED
from tests.integration.page_folder import ENDED_WITHIN_S, PageFolder
from tests.integration.warm_roles import Forker
from tests.tidy.source import ROOT

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]

EXAMPLES = {
    "lightning_digits.py": ("--epochs", r"(\d+) steps, test accuracy (\d+\.\d)%"),
    "accelerate_digits.py": ("--epochs", r"epoch (\d+) of \d: test accuracy (\d+\.\d)%"),
    "transformers_tiny.py": ("--steps", r"(\d+) steps, loss (\d+\.\d+)"),
}


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    """What forks processes that have imported the frameworks, once for all."""
    forker = Forker(("sklearn.datasets", *IMPORTED))
    yield forker
    forker.close()


def trained(example: str, option: str, folder: Path, forker: Forker) -> str:
    """What the example prints that was given this option."""
    words = ("-w", "2", "-s", "2", "--", *option.split(), "--folder", str(folder))
    script = str(ROOT / "examples" / example)
    with Tool("train", script, *words, cwd=folder, is_warm=True, forker=forker) as tool:
        assert tool.end(ENDED_WITHIN_S) == 0, tool.text
    return tool.text


@pytest.mark.thorough
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_and_goes_on(example: str, tmp_path: Path, forker: Forker) -> None:
    option, pattern = EXAMPLES[example]
    # The second run by epochs has none left. Transformers' Trainer takes a step all the same.
    ends = ("20", "40") if option == "--steps" else ("1", "1", "2")
    found = []
    for end in ends:
        printed = trained(example, f"{option} {end}", tmp_path, forker)
        found += [(int(line[0]), float(line[1])) for line in re.findall(pattern, printed)]
    (before, first), *same, (after, second) = found
    assert same in ([], [(before, first)])
    assert after == 2 * before, "the second run is the rest of the first"
    if option == "--steps":
        assert second < first / 2
    else:
        assert second > 90


def test_the_page_shows_what_the_examples_do() -> None:
    page = PageFolder("guides/FRAMEWORKS.md", Path())
    for example, block in zip(EXAMPLES, page.blocks("python"), strict=True):
        script = (ROOT / "examples" / example).read_text(encoding="utf-8")
        lines = iter(re.sub(r"(?<=\S)  #.*", "", line).strip() for line in script.splitlines())
        missing = [
            line for line in block.splitlines() if line.strip() and line.strip() not in lines
        ]
        assert missing == [], example
        assert f"(../../examples/{example})" in page.text


@pytest.mark.thorough
def test_accelerates_loader_tells_the_sampler_its_epoch() -> None:
    """As in a run that is resumed, whose first epoch is not 0."""
    from accelerate import Accelerator

    with ps.local_cluster(1, 1) as cluster, ps.connect(cluster.address) as client:
        sampler = ps.DistributedSampler(client, 20)
        order, samples = list(sampler), TensorDataset(torch.arange(20))
        loader = Accelerator(cpu=True).prepare(DataLoader(samples, 2, sampler=sampler))
        sampler.set_epoch(2)
        assert torch.cat([each for (each,) in loader]).tolist() == order, "what the page warns of"
        loader.set_epoch(2)
        assert torch.cat([each for (each,) in loader]).tolist() == list(sampler) != order
