"""The folder that a conversion writes: refused early where it cannot be, named only when complete.

A conversion of a large model takes hours, so what the file system would refuse at the end is looked
at before the work begins; what it refuses nevertheless becomes one error, not a traceback.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tpla.core.errors import CheckpointError


def check_destination(source: Path, destination: Path, needed_bytes: int) -> None:
    """Whether a conversion of ``source`` could be written to ``destination``.

    Args:
        source: the checkpoint, which must not hold the destination.
        destination: must be absent or empty.
        needed_bytes: of the weights that will be written.

    Raises:
        CheckpointError: it could not.
    """
    with _explained(destination):
        if destination.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(f"{destination} lies in {source}; choose a folder outside of it")
        _check_name(destination)
        _check_place(destination, needed_bytes)


@contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """A folder beside ``destination`` that gets its name on success and is removed on failure.

    For destinations that passed :func:`check_destination`.

    Raises:
        CheckpointError: the file system refused something; a complete folder is kept then.
    """
    staging = _staging_path(destination)
    with _explained(destination):
        staging.mkdir(parents=True)
        try:
            yield staging
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    try:
        staging.rename(destination)
    except OSError as error:
        raise CheckpointError(
            f"{staging} is complete, but cannot be renamed to {destination} ({error.strerror}); "
            "rename it by hand, the conversion need not be repeated"
        ) from error


def copy_contents(source: Path, target: Path, skipped: Callable[[str], bool]) -> None:
    """Copy a folder's files into ``target``, without their modes.

    Modes are left out because weights are often kept read-only: a copy with the mode of such a
    folder takes no further file, and cannot be removed.

    Args:
        source: links in it are followed.
        target: made if absent.
        skipped: whether files and folders of a name are left out.
    """
    for folder, folders, files in os.walk(source, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not skipped(name)]
        copy = target / Path(folder).relative_to(source)
        copy.mkdir(exist_ok=True)
        for name in files:
            if not skipped(name):
                shutil.copyfile(Path(folder) / name, copy / name)


def _check_name(destination: Path) -> None:
    """Whether a finished folder could be renamed to ``destination``."""
    if destination.is_symlink():
        raise CheckpointError(
            f"{destination} is a symbolic link, which a folder cannot replace; remove it, or give "
            "the folder that it should point to"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists and is not empty; remove it or choose another")
    if os.path.ismount(destination):
        raise CheckpointError(
            f"{destination} is a mount point, which a folder cannot replace; give a folder in it"
        )
    staging = _staging_path(destination)
    if staging.exists():
        raise CheckpointError(
            f"{staging} exists, from a conversion that runs or was killed; remove it if none runs"
        )


def _check_place(destination: Path, needed_bytes: int) -> None:
    """Whether the folder that will hold ``destination`` takes it."""
    parents = _staging_path(destination).parents
    place = next(parent for parent in parents if os.path.lexists(parent))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{place} is no folder that can be written to, so {destination} cannot be made in it; "
            "change its permissions or choose another"
        )
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{place} has {free / 2**30:.1f} GiB free, the weights take "
            f"{needed_bytes / 2**30:.1f} GiB; free some or choose another destination"
        )


def _staging_path(destination: Path) -> Path:
    whole = Path(os.path.abspath(destination))  # "." has no name
    return whole.with_name(whole.name + ".tmp")


@contextmanager
def _explained(destination: Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{destination} cannot be written: {error}; free space or change permissions there, "
            "in the source or in TMPDIR, and convert again"
        ) from error


def _raise(error: OSError) -> None:
    raise error
