"""The class archive that a JVM gets for Spark: only a file that no other account could have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgtrickle.spark.class_archive import archive_options, archive_path


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = archive_path("17")
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"classes")
    path.chmod(0o400)
    return path


def test_the_file_is_used(archive: Path) -> None:
    assert archive_options("17")[0] == f"-XX:SharedArchiveFile={archive}"


def test_another_java_has_another_file(archive: Path) -> None:
    assert archive_path("21") != archive
    assert archive_options("21") == ()


@pytest.mark.parametrize("mode", [0o420, 0o402])
def test_a_file_that_others_can_write_is_not_used(archive: Path, mode: int) -> None:
    archive.chmod(mode)
    assert archive_options("17") == ()


def test_a_file_in_a_directory_that_others_can_write_is_not_used(archive: Path) -> None:
    archive.parent.chmod(0o770)
    assert archive_options("17") == ()


def test_a_link_is_not_used(archive: Path) -> None:
    archive.rename(archive.with_name("elsewhere"))
    archive.symlink_to(archive.with_name("elsewhere"))
    assert archive_options("17") == ()
