"""What checks ask of processes and what they answer: the GPU check, self-tests of classes, injected faults."""
