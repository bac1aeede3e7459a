"""Work folders, also those of killed processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshinfer.config import Folders
from meshinfer.errors import InputError, NoSpaceError
from meshinfer.files import work
from meshinfer.files.disk import require_space
from meshinfer.files.work import held_briefly, work_folder


def test_a_work_folder_is_gone_after_success_failure_and_interrupt(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with work_folder(folders) as work:
                (work / "half").write_text("x")
                if error:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert list(folders.work.iterdir()) == []
        assert [path.name for path in folders.locks.iterdir()] == ["work.lock"]


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from meshinfer.config import Folders; "
        "from meshinfer.files.work import work_folder\n"
        "with work_folder(Folders(Path(sys.argv[1]))) as work:\n"
        "    (work / 'half').write_text('x'); os._exit(9)"
    )
    with work_folder(Folders(tmp_path)) as mine:
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
        left = [path for path in mine.parent.iterdir() if path.is_dir() and path != mine]
        assert len(left) == 1
        with work_folder(Folders(tmp_path)) as other:
            assert not left[0].exists()
            assert mine.is_dir()
            assert other.is_dir()
    assert list(mine.parent.iterdir()) == []


def test_too_little_space_is_told_with_both_numbers_and_nothing_is_written(tmp_path: Path) -> None:
    nowhere = tmp_path / "not" / "yet"
    require_space(nowhere, 1)
    with pytest.raises(NoSpaceError) as caught:
        require_space(nowhere, 1 << 60)
    assert caught.value.needed_bytes == 1 << 60 > caught.value.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot read or write"), work_folder(Folders(tmp_path / "file")):
        pass


def test_a_lock_that_somebody_keeps_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LOCK_TIMEOUT_S", 0.0)
    lock = tmp_path / "a.lock"
    with held_briefly(lock), pytest.raises(InputError, match=r"another process holds .*a\.lock"), held_briefly(lock):
        pass
    with held_briefly(lock):
        pass
