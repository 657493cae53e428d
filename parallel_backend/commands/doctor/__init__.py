"""Examines an installation and its machine: probes observe, checks turn that into verdicts. See docs/doctor.md."""
