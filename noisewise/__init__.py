"""noisewise: choose which noise levels a diffusion model trains on."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noisewise.names import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Names are imported at their first use: torch takes a second, and `noisewise --help` should not wait for it."""
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    names = importlib.import_module("noisewise.names")
    if name == "__all__" or name in names.__all__:
        return getattr(names, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module("noisewise.names").__all__]
