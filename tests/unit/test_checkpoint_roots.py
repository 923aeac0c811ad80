"""From where a restore may be asked for: what leads elsewhere is refused, and never opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_core.errors import InvalidConfig, NotPermitted
from ps_runtime.checkpoint.roots import check_root

BUCKET = "s3://bucket/runs"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root, with a link that leads out of it and one that does not."""
    root = tmp_path / "runs"
    (root / "7").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (root / "newest").symlink_to(root / "7")
    (tmp_path / "same").symlink_to(root)
    return root


@pytest.mark.parametrize("name", ["", "7", "7/", "newest", "7/../7", "not yet there"])
def test_what_lies_in_a_root_may_be_named(root: Path, name: str) -> None:
    roots = ("", str(root))
    for prefix in ("", "file://"):
        check_root(f"{prefix}{root}/{name}", roots)
        check_root(f"{prefix}{root.parent}/same/{name}", roots)
    check_root(str(root / "7"), (f"file://{root}/",))


@pytest.mark.parametrize(
    "url",
    [
        "{root}/..", "{root}/7/../../elsewhere", "{root}/out", "{root}/out/x", "{root}s",
        "/", "/etc/passwd", "~", "file:/etc", "file:///etc", "http://169.254.169.254/latest",
        "s3://bucket/runs/7", "{root}/7::http://host/x", "simplecache::file://{root}/7",
        "simplecache::{root}/7", "file:{root}/../x",
    ],
)  # fmt: skip
def test_what_leads_out_of_a_local_root_is_refused(root: Path, url: str) -> None:
    with pytest.raises(NotPermitted, match="--checkpoint-roots"):
        check_root(url.format(root=root), (str(root),))


def test_a_relative_root_is_that_of_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    roots = (".",)
    check_root("7", roots)
    check_root(str(root / "7"), roots)
    for url in ("..", "~/x", "file:/etc", "out"):
        with pytest.raises(NotPermitted):
            check_root(url, roots)


@pytest.mark.parametrize("rest", ["", "/", "/7", "/00000007-abc/", "/a/b.c"])
def test_what_begins_with_a_root_elsewhere_may_be_named(rest: str) -> None:
    check_root(BUCKET + rest, (BUCKET,))


@pytest.mark.parametrize(
    "url",
    [
        BUCKET + "2", BUCKET + "/..", BUCKET + "/../other", BUCKET + "/.", BUCKET + "//x",
        BUCKET + "/%2e%2e/other", BUCKET + "/7::file:///etc", BUCKET + "/7?x=1", BUCKET + "/7#x",
        BUCKET + "/7\n", "s3://bucket", "s3a://bucket/runs/7", "simplecache::" + BUCKET, "/etc",
    ],
)  # fmt: skip
def test_what_leads_out_of_a_root_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(NotPermitted):
        check_root(url, (BUCKET,))


def test_without_a_root_nothing_may_be_named(root: Path) -> None:
    for roots in ((), ("",)):
        with pytest.raises(NotPermitted, match="nowhere"):
            check_root(str(root), roots)


def test_what_is_no_url_is_named() -> None:
    with pytest.raises(InvalidConfig, match="printable"):
        check_root("/runs/\x00", ("/runs",))
