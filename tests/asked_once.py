"""What every process asks once, asked before the processes of the tests are forked."""

from train.config import config_class
from train.logger import environment

config_class(), environment()
