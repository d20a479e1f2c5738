"""Files of a pipeline, written atomically; other users cannot read the private ones."""

from __future__ import annotations

from apache_beam.io.filesystems import FileSystems

from tf_labeldp.vault.files import PlainFile


def write_whole(path: str, content: bytes, *, private: bool = False) -> None:
    """Writes or replaces a file on any file system that Beam knows, also when retries overlap.

    A private file has mode 600 on a local or mounted disk; elsewhere the folder's rules protect it.
    """
    if "://" in path:
        with FileSystems.create(path, mime_type="application/octet-stream") as file:
            file.write(content)
        return
    PlainFile(path).write(content, replace=True, mode=0o600 if private else 0o666)
