"""Preloaded into the process from which the processes of the tests are forked: computes two cached
values that every run needs, the class of the configuration and the environment's description."""

from train.base.environment import environment
from train.config import config_class

config_class(), environment()
