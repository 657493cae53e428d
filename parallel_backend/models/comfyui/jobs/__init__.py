"""The parts of ComfyUI that jobs use in a rank: modules of packs, patchers of models, samplers."""
