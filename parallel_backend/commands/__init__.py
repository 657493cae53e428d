"""Programs that a person starts: doctor, GPU check, bench, models, resend, cluster. They need no ComfyUI."""
