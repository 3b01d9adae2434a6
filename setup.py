"""Build entry point; all metadata is in pyproject.toml. `ops/` installs under the import name `xgr_ops`."""

from setuptools import find_packages, setup

ops_packages = ["xgr_ops", *(f"xgr_ops.{name}" for name in find_packages("ops"))]

setup(
    packages=[*find_packages(include=["xgr_runtime", "xgr_runtime.*"]), *ops_packages],
    package_dir={"xgr_ops": "ops"},
)
