"""Secrets that change under a running server: a value read from files, and read again when they change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .settings import ConfigError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[tuple[int, ...] | None, ...]


class Watched(Generic[T]):
    """What `read` makes of `paths`. Construction raises what `read` raises, ConfigError for files that cannot be used,
    unless a value is known that was `good` before.

    Files that cannot be used later on are an error in the log, once a change; the last good value stays in force.
    Replace a file by renaming another over it, or through a symbolic link as Kubernetes does: a file that is half
    written when it is read is read again, but may be valid by accident.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T], good: T | None = None) -> None:
        self._paths = paths
        self._read = read
        self._stamp = self._look()
        try:
            self.value = read()
        except ConfigError as error:
            if good is None:
                raise
            self._warn(error)
            self.value = good

    def refresh(self) -> bool:
        """Look whether the files have changed, and read them if so; whether there is a new value. Any thread."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            self.value = self._read()
        except ConfigError as error:
            self._warn(error)
            return False
        _log.info("changed files are used from now on", extra={"files": self._names()})
        return True

    def _warn(self, error: ConfigError) -> None:
        extra = {"files": self._names(), "error": error}
        _log.error("changed files are not used, the last good ones stay", extra=extra)

    def _names(self) -> list[str]:
        return [str(path) for path in self._paths]

    def _look(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    """What changes with a file's content, behind all symbolic links; None where there is no file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_file(setting: str, path: Path) -> bytes:
    """The content of the file that a setting names. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {setting} = {path}: {error.strerror}; name a file that this user may read"
        ) from None
