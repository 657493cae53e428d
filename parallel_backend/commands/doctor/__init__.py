"""The doctor: probes read the installation and the machine, checks turn that into findings. See docs/doctor.md."""
