"""What every process asks once, asked before the processes of the tests are forked."""

from train.base.environment import environment
from train.config import config_class

config_class(), environment()
