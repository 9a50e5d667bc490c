# The public names. `__init__.py` imports each from its module when it is used.
from ssdctl import errors as errors
from ssdctl._version import __version__ as __version__
from ssdctl.api import configure as configure
from ssdctl.api import default_boxes as default_boxes
from ssdctl.api import evaluate as evaluate
from ssdctl.api import export as export
from ssdctl.api import load as load
from ssdctl.api import prepare as prepare
from ssdctl.api import report as report
from ssdctl.api import train as train
from ssdctl.config.settings import Config as Config
from ssdctl.inference.predict import Predictor as Predictor
from ssdctl.input.dataset import Dataset as Dataset
from ssdctl.model.loss import MultiboxLoss as MultiboxLoss
from ssdctl.model.results import Detection as Detection
from ssdctl.model.results import Result as Result
from ssdctl.model.ssd300 import SSD300 as SSD300
from ssdctl.runs.evaluation import Evaluation as Evaluation
from ssdctl.runs.run import Run as Run
from ssdctl.training.observers import Observer as Observer
from ssdctl.training.trainer import Trainer as Trainer

def __dir__() -> list[str]: ...
