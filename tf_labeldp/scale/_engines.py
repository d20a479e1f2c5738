"""The check that an engine is installed."""

from __future__ import annotations

from importlib.util import find_spec


def needs(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"tf_labeldp.scale.{extra} needs {package}, which is not installed. Run "
            f"pip install 'tf-labeldp[{extra}]', or use the stateless randomize_batch.",
            name=package,
        )
