"""Old names of what is in json, names, grounds, units and predict now."""

from kvsim.report.grounds import error as error
from kvsim.report.json import Row as Row
from kvsim.report.json import number as number
from kvsim.report.names import deployment as deployment
from kvsim.report.names import params as params
from kvsim.report.names import spec as spec
from kvsim.report.predict import prediction as prediction
from kvsim.report.units import gib as gib
