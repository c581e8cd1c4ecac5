"""Every failure that a person can cause or cure, one class per exit code. No traceback is shown for these: the message says
what, where, why, and the line that mends it."""


class LongshiftError(Exception):
    """Base class; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(LongshiftError):
    """A wrong command line, config or layout."""

    exit_code = 2


class DataError(LongshiftError):
    """A bad document, token or tokenizer; the message names file, line and byte."""

    exit_code = 3


class CheckpointError(LongshiftError):
    """A checkpoint or model folder that is missing, damaged, foreign or cannot be written."""

    exit_code = 4


class NonFiniteError(LongshiftError):
    """A loss or gradient that is not finite."""

    exit_code = 5


class PeerError(LongshiftError):
    """A rank died or did not answer in time."""

    exit_code = 6


class OutOfMemoryError(LongshiftError):
    """Device, host or disk memory is not enough."""

    exit_code = 7
