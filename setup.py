"""Build entry point; all metadata is in pyproject.toml.

Three folders of the checkout lie elsewhere than they are imported from: `ops/` installs under the import name `xgr_ops` (plain
`ops` is another project), and what the `xgr` command needs beside the runtime lies inside its package, where it is found in a
wheel, in an editable installation and in an sdist alike: `configs/`, `proto/` and the demo.
"""

from setuptools import find_packages, setup

MOVED = {
    "xgr_ops": "ops",
    "xgr_runtime.configs": "configs",
    "xgr_runtime.demo": "tools/demo",
    "xgr_runtime.proto": "proto",
}

setup(
    packages=[
        *find_packages(include=["xgr_runtime", "xgr_runtime.*"]),
        *MOVED,
        *(f"xgr_ops.{name}" for name in find_packages("ops")),
    ],
    package_dir=MOVED,
)
