"""Which folders become which packages: ``domains``, ``data`` and ``configs`` are installed under ``zoo``.

Generic top-level names in site-packages would shadow users' own ``data`` folders and be shadowed by them. All other
settings are in pyproject.toml; only the search for packages needs code.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("domains", "data", "configs")


def packages_below(folder: str) -> list[str]:
    """Every package in a top-level folder, folders without ``__init__.py`` (YAML, weights) included."""
    return find_namespace_packages(include=[folder, f"{folder}.*"], exclude=["*.__pycache__"])


setup(
    packages=packages_below("zoo") + [f"zoo.{name}" for folder in FOLDERS for name in packages_below(folder)],
    package_dir={f"zoo.{folder}": folder for folder in FOLDERS},
)
