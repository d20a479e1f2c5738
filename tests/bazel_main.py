"""What Bazel's py_test runs: pytest on the folder given."""

import sys

import pytest

if __name__ == "__main__":
    # An editable installation would silently supply what a Bazel target forgot.
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if not getattr(finder, "__module__", "").startswith("__editable__")
    ]
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
