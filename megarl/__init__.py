"""megarl: online reinforcement learning for language models at Megatron speed.

This file stays empty on purpose: engine workers import `megarl.resharding.vllm_plugin`, and nothing heavy may come
along.
"""

__version__ = "0.1.0"
