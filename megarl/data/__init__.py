"""Prompts and examples: reading, tokenising, ordering, packing, balancing. No Megatron, no process group."""
