"""The facts of a MODEL: its file, how it was loaded, the verdict on its class, and whether its network changed."""
