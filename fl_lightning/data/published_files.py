"""Published files of a data set: found in a folder, or fetched where that is allowed."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fl_lightning.data.local import Arrays
from fl_lightning.errors import InputError, error_reason

DOWNLOAD_TIMEOUT = 30.0  # seconds


class PublishedFiles(ABC):
    """The files of a data set of images.

    Args:
        dataset: its name.
        folder: where the files lie, or are put by a download.
        instead: what else puts the files there, for messages.
    """

    def __init__(self, dataset: str, folder: Path, *, instead: str = "put the files there") -> None:
        self.dataset, self.folder, self.instead = dataset, folder, instead

    @abstractmethod
    def missing(self) -> list[str]:
        """Return the names of the files that are not there."""

    @abstractmethod
    def download(self, folder: Path) -> None:
        """Fetch the missing files, and others that come with them.

        Args:
            folder: where they are put. It has the name of the files' own folder, to which they are
                moved once all of them are there.

        Raises:
            OSError, RuntimeError: one could not be fetched.
        """

    @abstractmethod
    def read(self) -> tuple[Arrays, Arrays]:
        """Return training and test images uint8 ``[N, C, side, side]`` with their classes int64
        ``[N]``.

        Raises:
            InputError: a file is damaged.
        """

    def prepare(self, download: bool) -> None:
        """Fetch missing files if ``download`` allows it; existing files are never replaced.

        Raises:
            InputError: a file is missing and was not fetched.
        """
        if not self.missing():
            return
        reason = self._fetch() if download else "--data.download is false"
        if self.missing():
            allow = "" if download else "write --data.download true, "
            raise InputError(
                f"{self.dataset}",
                f"file {self.missing()[0]} is not in {self.folder} and was not fetched ({reason})",
                f"{self.instead}, {allow}or run configs/kd_default.yaml, which needs no network",
            )

    def _fetch(self) -> str:
        """Download the files; return the reason why one may still be missing."""
        new = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (
                _socket_timeout(DOWNLOAD_TIMEOUT),
                TemporaryDirectory(prefix=".download-", dir=self.folder) as aside,
            ):
                fetched = Path(aside, self.folder.name)
                fetched.mkdir()
                self.download(fetched)
                for file in fetched.iterdir():
                    if not (self.folder / file.name).exists():
                        file.replace(self.folder / file.name)
        except (OSError, RuntimeError) as error:
            for folder in new:
                with suppress(OSError):  # rmdir refuses a folder that is not there or not empty
                    folder.rmdir()
            return error_reason(error)
        return "the download did not hold it"


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set the timeout of new sockets within the block."""
    before = socket.getdefaulttimeout()
    # torchvision sets no timeout, so a firewall that drops packets would hang the run
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
