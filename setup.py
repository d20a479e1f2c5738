"""What pyproject.toml can't say: keras_layers/ is installed as tf_labeldp.keras_layers."""

from setuptools import find_packages, setup


def installed_name(folder_name: str) -> str:
    """Gives `keras_layers[.x]` its place under tf_labeldp; a generic name would collide."""
    return f"tf_labeldp.{folder_name}" if folder_name.startswith("keras_layers") else folder_name


SOURCES = find_packages(include=["tf_labeldp", "tf_labeldp.*", "keras_layers", "keras_layers.*"])

setup(
    packages=[installed_name(name) for name in SOURCES],
    package_dir={"tf_labeldp": "tf_labeldp", "tf_labeldp.keras_layers": "keras_layers"},
)
