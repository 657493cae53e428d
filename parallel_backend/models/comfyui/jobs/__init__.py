"""What jobs need of ComfyUI in a rank: modules of packs, patchers of models, samplers."""
