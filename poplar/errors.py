"""Everything Poplar raises on purpose.

    PoplarError
    |-- ConfigError             a setting or an argument is wrong (also a ValueError)
    |-- ShapeError              lengths or shapes that must fit do not (also a ValueError)
    |-- ProfileError            a card could not be profiled
    |-- InfeasiblePlanError     no allocation satisfies the request (also a ValueError)
    |-- PlanMismatchError       a plan meets a cluster or a batch it was not made for (also a ValueError)
    |-- ModelError              the model cannot be trained as it is
    |   `-- ScheduleError       a module ran at a place that the ranks had not agreed on
    |-- StepError               another rank failed in a step; the step was discarded everywhere
    |-- NonFiniteError          losses or gradients stayed inf or NaN
    |-- RankFailedError         a rank raised something that Poplar did not, or was killed
    |-- CheckpointError         a checkpoint is missing, damaged or of another model
    `-- CommunicationError      ranks disagree, or a collective gave a wrong result

A message says what was expected, what was got, on which rank, and what to change. The command line prints it without a
traceback.
"""


class PoplarError(Exception):
    """Base of every error that Poplar raises on purpose."""


class ConfigError(PoplarError, ValueError):
    """A setting or an argument is wrong."""


class ShapeError(PoplarError, ValueError):
    """Lengths or shapes that must fit do not."""


class ProfileError(PoplarError):
    """A card could not be profiled."""


class InfeasiblePlanError(PoplarError, ValueError):
    """No allocation satisfies the request."""


class PlanMismatchError(PoplarError, ValueError):
    """A plan meets a cluster, a data set or a batch that it was not made for."""


class ModelError(PoplarError):
    """The model cannot be trained as it is."""


class ScheduleError(ModelError):
    """A module ran at a place that the ranks had not agreed on."""


class StepError(PoplarError):
    """Another rank failed in a step; the step was discarded on every rank."""


class NonFiniteError(PoplarError):
    """Losses or gradients stayed inf or NaN."""


class RankFailedError(PoplarError):
    """A rank raised something that Poplar did not, or was killed. ``details`` holds its traceback, if there is one."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


class CheckpointError(PoplarError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class CommunicationError(PoplarError):
    """Ranks disagree, or a collective gave a wrong result."""
