"""The wheel, installed in a clean environment away from the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

TRAIN_TIMEOUT_S = 180

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, so that nothing left in build/ gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel; it borrows the dependencies of this one."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    # A path file inside a borrowed folder is not read, so this checkout's editable install is not.
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install"]
    run = subprocess.run(
        [*pip, "--no-deps", "--ignore-installed", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return home / "bin"


def run_in(folder: Path, *command: str | Path, **added: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with nothing of ours in its environment but what is added."""
    ours = ("OMP_NUM_THREADS", "PUSHPULL_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept | added,
        capture_output=True,
        text=True,
        timeout=TRAIN_TIMEOUT_S,
        check=False,
    )


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {
        "ps_cli",
        "ps_core",
        "ps_runtime",
        "ps_server",
        "ps_worker",
        "pushpull",
        "scheduler",
    }
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    for needed in ("pushpull/v1/types.proto", "pushpull/v1/types_pb2.pyi", "ps_worker/py.typed"):
        assert needed in names


def test_the_wheel_is_what_runs(bin_folder: Path, tmp_path: Path) -> None:
    asked = "import pushpull, ps_core, scheduler; print(pushpull.connect.__code__.co_filename)"
    run = run_in(tmp_path, bin_folder / "python", "-c", asked)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_relative_to(bin_folder.parent)


def test_it_trains_away_from_the_checkout(bin_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "digits_cnn.py"
    for name in (script.name, "digits.csv.gz"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    for name in ("scheduler", "ps_server"):  # the user's own, found before ours
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the role')\n")
    run = run_in(
        tmp_path,
        *(bin_folder / "pushpull", "train", script, "--workers", "2", "--servers", "2"),
        *("--", "--epochs", "4"),
        PYTHONPATH=".",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    reached = re.search(r"test accuracy (\d+\.\d+)%", run.stdout)
    assert reached, run.stdout
    assert float(reached[1]) > 80.0


def test_its_cluster_answers_status(bin_folder: Path, tmp_path: Path) -> None:
    asked = (
        "import subprocess, sys, pushpull as ps\n"
        "with ps.local_cluster(servers=2, workers=1) as cluster:\n"
        "    command = [sys.argv[1], 'status', '--json', '--scheduler', cluster.address]\n"
        "    sys.exit(subprocess.run(command).returncode)\n"
    )
    run = run_in(tmp_path, bin_folder / "python", "-c", asked, bin_folder / "pushpull")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)
