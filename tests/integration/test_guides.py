"""Pages of docs/guides: their scripts run, and print what the pages promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.page_folder import ENDED_WITHIN_S, PageFolder, differences

EMBEDDINGS = ("taste.py", "line.py", "clicks.py", "look.py", "update.py")
"""The scripts of its page, in their order."""

ADDRESS = re.compile(r"127\.0\.0\.1:\d+")

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]


STEP = "        optimizer.zero_grad()\n"
AWAIT_A_READER = """\
        while step == 100 and not __import__("os").path.exists({!r}):
            __import__("time").sleep(0.01)
"""


@pytest.mark.thorough
def test_the_reader_the_worker_and_the_checkpoint_agree_in_the_end(tmp_path: Path) -> None:
    page = PageFolder("guides/EVALUATION.md", tmp_path)
    page.save("task.py", "train.py", "evaluate.py", "judge.py")
    script, read = tmp_path / "train.py", tmp_path / "read"
    script.write_text(script.read_text().replace(STEP, AWAIT_A_READER.format(str(read)) + STEP))
    train, evaluate, *later = page.commands()
    with page.start(train) as tool:
        address = tool.wait_for(r"scheduler at (127\.0\.0\.1:\d+);")[1]
        told, count = ADDRESS.subn(address, evaluate)
        assert count == 1
        with page.start(told) as reader:
            reader.wait_for(r"reader: after step \d+")
            read.touch()  # before that training has no end
            assert reader.end(ENDED_WITHIN_S) == 0, reader.text
        seen = reader.text
        assert tool.end(ENDED_WITHIN_S) == 0, tool.text
    assert not differences(page.blocks("text")[0], seen), seen
    (between,) = re.findall(r"worker: after step 200 (\d+\.\d%) right", tool.text)
    (ended,) = re.findall(r"worker: in the end (\d+\.\d%) right", tool.text)
    export, judge = later
    page.type(export)
    assert page.type(judge) == f"checkpoint: {ended} right\n"
    assert between == ended
    steps = [int(step) for step in re.findall(r"after step (\d+)", seen)]
    assert steps == sorted(steps)
    if steps[-1] == 200:  # it may also have found the cluster ended
        assert f"after step 200 {ended} right\n" in seen


@pytest.mark.thorough
def test_the_script_for_gpus_trains_on_the_cpu(tmp_path: Path) -> None:
    page = PageFolder("guides/GPU.md", tmp_path)
    page.save("train.py")
    (train,) = page.commands()
    loss = re.search(r"on cpu: loss (\d+\.\d+)", page.type(train))
    assert loss
    assert float(loss[1]) < 0.5


@pytest.mark.thorough
def test_the_script_for_codecs_learns_with_fewer_bytes(tmp_path: Path) -> None:
    page = PageFolder("guides/COMPRESSION.md", tmp_path)
    page.save("train.py", "experts.py")
    train, experts = page.commands()
    printed = page.type(train)
    found = re.findall(r"(\S+): loss (\d\.\d+), (\S+) MB pushed, (\S+) MB pulled", printed)
    assert not differences(page.blocks("text")[0], printed), printed
    losses, pushed, pulled = ([float(line[at]) for line in found] for at in (1, 2, 3))
    codecs = ["none", "bf16", "int8", "sign", "topk:0.05", "lowrank:4"]
    assert [line[0] for line in found] == codecs
    assert max(losses) < 0.4
    assert max(losses[:3]) - min(losses) < 0.02
    assert losses[3] - min(losses) < 0.05
    assert losses[4] - min(losses) < 0.1
    assert losses[5] - min(losses) < 0.05
    assert [each / pushed[0] for each in pushed] == pytest.approx(
        [1.0, 0.5, 0.255, 0.036, 0.1, 0.131], abs=0.01
    )
    assert [each / pulled[0] for each in pulled] == pytest.approx(
        [1.0, 0.5, 0.5, 0.5, 0.5, 0.5], abs=0.01
    )
    assert page.blocks("text")[2].strip() in page.type(experts).splitlines()


@pytest.mark.thorough
def test_the_script_for_outer_steps_learns_with_fewer_steps_on_the_network(tmp_path: Path) -> None:
    page = PageFolder("guides/DILOCO.md", tmp_path)
    page.save("train.py")
    (train,) = page.commands()
    printed = page.type(train)
    assert not differences(page.blocks("text")[0], printed), printed
    found = re.findall(r"each (\w+): loss (\d\.\d+), (\S+) MB pushed", printed)
    losses, pushed = ([float(line[at]) for line in found] for at in (1, 2))
    assert [line[0] for line in found] == ["step", "20th"]
    assert max(losses) < 0.2
    assert pushed[1] / pushed[0] == pytest.approx(1 / 20, rel=0.02)


@pytest.mark.thorough
def test_a_plan_is_what_its_page_shows(tmp_path: Path) -> None:
    page = PageFolder("guides/PLANNING.md", tmp_path)
    lines = page.commands()
    for line, shown in zip(lines, page.blocks("text"), strict=False):  # later blocks measure
        printed = [each.rstrip() for each in page.type(line).splitlines()]
        assert printed == shown.splitlines()
    assert "Step time over bandwidth" in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_model_with_rows_on_the_servers_learns(tmp_path: Path) -> None:
    page = PageFolder("guides/EMBEDDINGS.md", tmp_path)
    page.save(*EMBEDDINGS)
    train, train_again, *to_take_out, bring_in, go_on = page.commands()
    trained = page.type(train)
    page.type(train_again)
    (first,) = (tmp_path / "runs" / "taste").glob("00000001-*")
    said = [page.type(re.sub(r"00000001-\w+", first.name, command)) for command in to_take_out]
    assert re.search(r"40 users, the first with \d\.\d\d", said[1])
    assert re.search(r"users: \d+ of 40 rows changed", said[3])
    assert said[4] == "40 users, as in model.safetensors\n"
    page.type(bring_in)
    resumed = page.type(go_on.replace("runs/pretrained", "runs/taste"))  # after its last step
    for each in (trained, page.type(go_on), resumed):
        loss = re.search(r"loss (\d+\.\d+)", each)
        assert loss
        assert float(loss[1]) < 0.3


@pytest.mark.thorough
def test_the_rest_of_that_model_may_stay_at_the_workers(tmp_path: Path) -> None:
    page = PageFolder("guides/EMBEDDINGS.md", tmp_path)
    page.save(*EMBEDDINGS)
    line, taste = (tmp_path / "line.py").read_text(), tmp_path / "taste.py"
    changed, count = re.subn(r"optimizer = ps\.Distributed.*\n", line, taste.read_text())
    assert count == 1
    taste.write_text(changed)
    loss = re.search(r"loss (\d+\.\d+)", page.type(page.commands()[0]))
    assert loss
    assert float(loss[1]) < 0.3


@pytest.mark.thorough
def test_a_model_that_was_written_for_torchrec_learns(tmp_path: Path) -> None:
    page = PageFolder("guides/EMBEDDINGS.md", tmp_path)
    page.save(*EMBEDDINGS)
    train = page.commands()[0].replace("taste.py", "clicks.py")
    loss = re.search(r"loss (\d+\.\d+)", page.type(train))
    assert loss
    assert float(loss[1]) < 0.3
