"""The garbage collector during large imports."""

from __future__ import annotations

import gc

import pytest

from clusterrun import imports


def failing_import(seen: list[bool]) -> None:
    with imports.uncollected():
        seen.append(gc.isenabled())
        raise ImportError


def test_off_inside_and_on_again_after_an_error() -> None:
    gc.unfreeze()
    seen: list[bool] = []
    with pytest.raises(ImportError):
        failing_import(seen)
    try:
        assert seen == [False]
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with imports.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
