"""Lets another store on this machine have a model."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from meshinfer.errors import InputError
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store


def lend(manifest: Manifest, lender: Store, borrower: Store) -> None:
    """Let another store have a model: the same files where the disk allows it, else copies."""
    if manifest.name in borrower.names():
        with suppress(InputError):
            there = borrower.load(manifest.name)
            if there.fingerprint() == manifest.fingerprint() and all(map(borrower.has, there.files)):
                return
        borrower.remove(manifest.name)
    with borrower.adding(manifest.name):
        for ref in manifest.files:
            if not borrower.has(ref):
                _link_or_copy(lender.path(ref), borrower.path(ref))
        borrower.save(manifest)


def _link_or_copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
