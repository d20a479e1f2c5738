"""Files of a pipeline: whole under their name, and the private ones for this user alone."""

from __future__ import annotations

import pathlib

from apache_beam.io.filesystems import FileSystems

from tf_labeldp.vault.records import publish


def write_whole(path: str, content: bytes, *, private: bool = False) -> None:
    """Writes a file of any file system that Beam knows, over an older one.

    A retry may write it again, at the same time too. A private file has mode 600; elsewhere than on
    a local or mounted disk, the folder's own rules protect it.
    """
    if "://" in path:
        with FileSystems.create(path, mime_type="application/octet-stream") as file:
            file.write(content)
        return
    publish(pathlib.Path(path), content, replace=True, mode=0o600 if private else 0o666)
