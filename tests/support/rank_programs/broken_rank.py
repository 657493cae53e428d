"""A rank that cannot start: `python -m …broken_rank` fails in its imports, as a broken installation does."""

import a_library_that_is_not_installed  # noqa: F401
