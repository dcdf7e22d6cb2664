"""The built-in learning-rate schedules, one file each; importing this package registers them."""

from holdfast.optim.schedules import constant as constant
from holdfast.optim.schedules import cosine as cosine
from holdfast.optim.schedules import cosine_rewarm as cosine_rewarm
from holdfast.optim.schedules import infinite as infinite
from holdfast.optim.schedules import linear as linear
from holdfast.optim.schedules import wsd as wsd
from holdfast.optim.schedules import wsds as wsds
