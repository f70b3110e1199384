"""What each rank did last, and who waits for whom: a log that is always on, dumps of it, and what they say together.

    ringspun.steplog.dump_on_signal("logs")     # then `kill -USR1` each rank of a job that hangs
    ringspun explain-hang logs/*.json

No framework is needed: the rings write the log, this package reads it.
"""

from ringspun.steplog.log import FOLDER_VARIABLE, Row, StepLog, What, dump
from ringspun.steplog.watch import dump_on_signal

__all__ = ["FOLDER_VARIABLE", "Row", "StepLog", "What", "dump", "dump_on_signal"]
