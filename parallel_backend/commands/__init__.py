"""Programs that a person starts: doctor, GPU check, bench, models, costs, cluster. They need no ComfyUI."""
