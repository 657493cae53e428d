"""Parts of benchmarks/load.py."""
