"""The model code: flat files that also travel with a checkpoint.

This file is not copied there, so siblings never import it.
"""

__all__: list[str] = []
