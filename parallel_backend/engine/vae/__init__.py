"""One image decoded by all ranks in exact bands of rows."""
