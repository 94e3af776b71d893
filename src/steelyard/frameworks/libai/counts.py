"""What LiBai prints about parameters and FLOPs: nothing."""

from steelyard.frameworks.views import Printed, View
from steelyard.spec.run import Run

NAME = "LiBai"


def printed(run: Run) -> tuple[Printed, ...]:
    return (Printed("libai", None, "LiBai logs neither parameter counts nor FLOPs."),)


def views(run: Run) -> tuple[View, ...]:
    return ()
