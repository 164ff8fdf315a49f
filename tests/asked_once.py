"""Preloaded into the process from which the processes of the tests are forked: computes cached
values that every run needs, such as the class of the configuration."""

from model.core.formulas import edited
from train.base.environment import environment
from train.config import config_class

config_class(), environment()
for kind in ("autoencoder", "chat", "classifier", "distill", "dpo", "gpt", "grpo", "lora", "memory",
             "moe", "sae"):
    edited(kind)
