"""Messages of checks: the GPU check, and self-tests of model classes."""
