"""The built-in optimizers, one file each; importing this package registers them."""

from holdfast.optim.optimizers import adafactor as adafactor
from holdfast.optim.optimizers import adamw as adamw
from holdfast.optim.optimizers import lion as lion
from holdfast.optim.optimizers import muon as muon
from holdfast.optim.optimizers import sgd as sgd
