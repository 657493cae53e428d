"""Messages of checks: the GPU check, self-tests of model classes, injected faults."""
