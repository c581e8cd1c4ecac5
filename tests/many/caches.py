"""Caches of the package: what was computed with a mistake outlives it, and what was computed without one hides it."""

import sys


def clear() -> None:
    """Empty the caches of all functions in the package's modules."""
    modules = [module for name, module in sys.modules.items() if name.startswith("longshift.")]
    for cache in [found for module in modules for found in vars(module).values() if hasattr(found, "cache_clear")]:
        cache.cache_clear()
