from twofold.api import PlanResult as PlanResult
from twofold.api import Simulation as Simulation
from twofold.api import Slo as Slo
from twofold.api import Trace as Trace
from twofold.api import UserError as UserError
from twofold.api import plan as plan
from twofold.api import simulate as simulate

__version__: str
