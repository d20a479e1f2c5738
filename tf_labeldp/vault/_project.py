"""A project: a folder of label stores that share one budget, since one person may be in several.

``project.json`` in the folder lists the stores, so that one that is missing is missed. All of them
take turns by one lock, that of the folder.
"""

from __future__ import annotations

import pathlib
import secrets
from typing import Any

from tf_labeldp.vault._records import (
    LabelStoreError,
    json_digest,
    publish,
    read_json,
    sealed_json,
)
from tf_labeldp.vault._store import PROJECT_FILE


class Project:
    """The project that a store belongs to; its methods are called within the store's turn.

    Attributes:
        name: random, and in the header of each store: one that was moved elsewhere is refused.
    """

    def __init__(self, store: pathlib.Path, *, is_new: bool) -> None:
        """Reads the list of stores; makes one for the first store of a project."""
        self._store, self._path = store, store.parent / PROJECT_FILE
        others = store.parent.glob("*/header.json")
        if is_new and not self._path.exists() and not any(_in_project(one) for one in others):
            self._write({"name": secrets.token_hex(16), "stores": {}})
        if not self._path.exists():
            raise LabelStoreError(
                f"The store {store} belongs to a project, and {self._path} is missing, so what "
                "its other stores have spent can't be counted. Put the store back into its "
                "project's folder, or restore the file from a backup."
            )
        self.name: str = self._read()["name"]
        kept = read_json(store / "header.json") if (store / "header.json").exists() else {}
        if kept.get("project", self.name) != self.name:
            raise LabelStoreError(
                f"The store {store} belongs to another project than that of {self._path}. Put it "
                "back into the folder of its project."
            )

    def stores(self) -> list[pathlib.Path]:
        """Returns the folders of the other stores, or raises if one is missing."""
        found = []
        for folder, label_set in self._read()["stores"].items():
            path = self._store.parent / folder
            header = read_json(path / "header.json") if (path / "header.json").exists() else {}
            if header.get("label_set") != label_set:
                raise LabelStoreError(
                    f"The project {self._path.parent} lacks its store {folder!r}: what it has "
                    "spent would be forgotten. Restore the folder from a backup. (To erase what "
                    "it holds and keep its account: tf-labeldp forget.)"
                )
            if path != self._store:
                found.append(path)
        return found

    def join(self, label_set: str) -> None:
        """Lists the store, once."""
        content = self._read()
        if content["stores"].get(self._store.name) != label_set:
            content["stores"][self._store.name] = label_set
            self._write(content)

    def _read(self) -> dict[str, Any]:
        content = read_json(self._path)
        if content.get("digest") != json_digest(content):
            raise LabelStoreError(
                f"{self._path} was edited or is damaged: it lists the stores whose spending adds "
                "up. Restore it from a backup."
            )
        return content

    def _write(self, content: dict[str, Any]) -> None:
        publish(self._path, sealed_json(content), replace=True)


def _in_project(header: pathlib.Path) -> bool:
    return read_json(header).get("project") is not None
