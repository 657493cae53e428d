"""The parts of `doctor --gpu` that need a rank's own process: its device, its attention kernels, one model call."""
