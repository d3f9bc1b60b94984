import os
import stat

import pytest

from critical_neurons.errors import OutputError
from critical_neurons.files import check_writable, write_atomically


def test_content_arrives_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "out.json"
    write_atomically(path, b"one")
    write_atomically(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["out.json"]


def test_checking_leaves_no_trace(tmp_path):
    old = tmp_path / "old.json"
    old.write_bytes(b"old")
    check_writable(old)
    check_writable(tmp_path / "new.json")
    assert os.listdir(tmp_path) == ["old.json"]
    assert old.read_bytes() == b"old"


def test_a_relative_path_without_directory_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomically("out.json", b"x")
    assert (tmp_path / "out.json").read_bytes() == b"x"


@pytest.mark.parametrize("act", [check_writable, lambda path: write_atomically(path, b"x")])
class TestRefusals:
    def test_directory(self, act, tmp_path):
        with pytest.raises(OutputError, match="is a directory"):
            act(tmp_path)

    def test_missing_parent(self, act, tmp_path):
        with pytest.raises(OutputError, match=r"missing does not exist\. Create it first"):
            act(tmp_path / "missing" / "out.json")
        assert not (tmp_path / "missing").exists()

    def test_parent_is_a_file(self, act, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OutputError, match="file is not a directory"):
            act(tmp_path / "file" / "out.json")

    def test_special_file(self, act, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OutputError, match="not a regular file"):
            act(tmp_path / "pipe")

    def test_name_too_long(self, act, tmp_path):
        with pytest.raises(OutputError, match="cannot be written"):
            act(tmp_path / ("x" * 300))

    def test_directory_that_refuses_new_files(self, act, tmp_path, monkeypatch):
        """Permissions do not bind root, who may run these tests; the refusal of the system is played."""

        def refuse(*_args, **_kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("pathlib.Path.touch", refuse)
        with pytest.raises(OutputError, match=r"out\.json: cannot be written \(Permission denied\)"):
            act(tmp_path / "out.json")


def test_a_write_that_fails_keeps_the_old_file_and_removes_the_draft(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_an_interrupted_write_keeps_the_old_file_and_removes_the_draft(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.json"]


def test_writing_to_a_link_writes_what_it_points_to(tmp_path):
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_atomically(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"


def test_an_existing_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
