"""Runs pytest on the arguments, for the py_test targets of Bazel."""

import sys

import pytest

if __name__ == "__main__":
    # An editable installation would hide missing files of a Bazel target.
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable__")
    ]
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
