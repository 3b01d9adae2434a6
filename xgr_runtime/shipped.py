"""The files that come with the package, wherever it is installed: configurations by name and the .proto files.

In a checkout they lie beside the package, in a wheel inside it; the import system knows both places (setup.py).
"""

from importlib import resources
from pathlib import Path
from typing import Literal

from xgr_runtime.errors import ConfigError, shown


def folder(name: Literal["configs", "proto"]) -> Path:
    """The folder of the configurations, or the root of the .proto files."""
    return Path(str(resources.files(f"xgr_runtime.{name}")))


def config_names() -> list[str]:
    """Names of the configurations that come with the package, sorted."""
    return sorted(path.stem for path in folder("configs").glob("*.yaml"))


def config_file(name_or_path: str) -> str:
    """The file of a configuration that comes with the package; anything that is no name of one is taken as a path.

    A path written with a separator or an ending (./demo, demo.yaml) is never a name. Raises ConfigError for a bare word that
    is neither.
    """
    if name_or_path in config_names():
        return str(folder("configs") / f"{name_or_path}.yaml")
    is_word = name_or_path.replace("-", "").replace("_", "").isalnum()
    if is_word and not Path(name_or_path).exists():
        known = ", ".join(config_names())
        raise ConfigError(
            f"no configuration is named {shown(name_or_path)} (known: {known}), and no file is"
        )
    return name_or_path
