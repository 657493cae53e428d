"""This folder has the messages of checks: the GPU check, self-tests of classes, injected faults."""
