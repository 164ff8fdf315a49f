"""A label for a text, and the evidence for it: a pretrained backbone and a small head.

    python run_train.py --config train/configs/classifier.yaml --init_from out/quick/ckpt.pt
    python -m model.classifier --ckpt out/classifier/ckpt_best.pt --data other.csv --out out/other

data/prepare/labels.py prepares the data; model.py is what is trained, report.py the command.
"""

# ruff: noqa: F401
from model.classifier.metrics import classification_metrics
from model.classifier.model import (
    MUST_MATCH_TO_INIT,
    USE,
    Classifier,
    Keys,
    build_model,
    class_weights,
    inherit_shape,
    open_data,
)
from model.classifier.report import main
