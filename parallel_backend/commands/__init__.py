"""Programs that a person starts: doctor, GPU check, bench, resend, cluster. They need no ComfyUI."""
