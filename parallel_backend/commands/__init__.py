"""The command-line programs: doctor, GPU check, bench, resend, cluster. They need no ComfyUI."""
