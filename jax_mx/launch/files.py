"""Files that are written whole or not at all, whatever becomes of the disk.

All writes of the library go through this module. Tests replace its `os` to make operations fail.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def whole(path: str | os.PathLike) -> Iterator[Path]:
    """A name beside a file: its content takes the file's place at the end.

    Whoever reads meanwhile reads the old file. If anything fails, nothing stays behind.

        with whole("choice.json") as temporary:
            write(temporary, [text.encode()])

    Args:
      path: of the file.

    Raises:
      OSError: the file cannot take its name.
    """
    target = Path(path)
    temporary = target.with_name(f".partial-{secrets.token_hex(8)}")
    try:
        yield temporary
        os.replace(temporary, target)  # noqa: PTH105 (tests replace `os`)
    except BaseException:
        remove(temporary)
        raise


def write(path: str | os.PathLike, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a new file.

    Args:
      path: of the file.
      parts: its content, one part behind the other; the next one is asked for when one is written.

    Raises:
      OSError: it cannot be written, or not all of it.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def replace(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file, in place of one that there may be.

    Raises:
      OSError: it cannot be written; the old one is as it was.
    """
    with whole(path) as temporary:
        write(temporary, [data])


def remove(path: str | os.PathLike) -> None:
    """Removes a file, if it is there and the disk lets it."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108


def make_folder(path: str | os.PathLike) -> None:
    """Makes a folder and those above it.

    Raises:
      OSError: there is none, and none can be made.
    """
    os.makedirs(path, exist_ok=True)  # noqa: PTH103


def locked(path: str | os.PathLike) -> IO[bytes]:
    """A file that locks are taken on, open.

    Raises:
      OSError: it cannot be opened.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb")


def require_writable(folder: Path, size: int = 1) -> None:
    """Nothing, where a folder takes a file of so many bytes now.

    Raises:
      OSError: it takes none.
    """
    probe = folder / f".partial-{secrets.token_hex(8)}"
    try:
        write(probe, [bytes(size)])
    finally:
        remove(probe)


def has_room(folder: Path, size: int) -> bool:
    """Whether a folder takes a file of so many bytes now."""
    try:
        require_writable(folder, size)
    except OSError:
        return False
    return True


def failure(op: str, path: str | os.PathLike, error: OSError) -> OSError:
    """The error that tells a caller which disk did not take a file, and what to do.

    Args:
      op: the public function.
      path: of the file.
      error: of the operation that failed.
    """
    text, disk = os.fspath(path), _disk_of(path)
    advice = "name a file in a folder that can be written"
    if error.errno in FULL:
        advice = f"the disk {disk} is full: make room, or name a file on another one"
    elif error.errno in (errno.EROFS, errno.EIO, errno.ESTALE):
        advice = f"the disk {disk} takes no files now: name one on another disk"
    told = type(error)(f"{op}: cannot write {text} ({error.strerror or error}); {advice}")
    told.errno = error.errno
    return told


def _disk_of(path: str | os.PathLike) -> str:
    """Where the disk of a file is mounted, as far as that can be said."""
    try:
        folder = Path(path).absolute().parent
        return str(next(f for f in (folder, *folder.parents) if os.path.ismount(f)))
    except (OSError, StopIteration):
        return f"of {os.fspath(path)}"
