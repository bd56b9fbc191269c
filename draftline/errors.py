"""Every error that Draftline raises on purpose.

    DraftlineError
    ├── ConfigError        a setting is unknown, out of range, or contradicts another
    ├── DataError          a data file or a row cannot be used
    │   └── TemplateError  the chat template is missing, or the answers cannot be located in what it renders
    ├── TargetError        the target cannot be loaded or hooked, or does not fit the drafter
    ├── CheckpointError    a folder is not a checkpoint, is incomplete, or belongs to something else
    ├── ExportError        a drafter cannot be written in the requested format
    ├── ServerError        a server does not answer, speaks another interface, or was started without what is wanted
    ├── StorageError       the disk is full or refuses to be written
    ├── PipelineError      a loop of the pipeline failed; the cause is chained
    │   ├── UpdateError    the optimiser failed half-way, so that weights and moments are in doubt
    │   └── RankError      another rank of the run has failed, or does not answer
    ├── AuditRefusal       the audit found what would make the run worthless; exit status 1
    └── Interrupted        Ctrl-C or SIGTERM: state was saved, exit status 130

The message of each is one line that names the value, the reason and the fix. The command line prints that line, if
there is one (of ranks that fail together one speaks), and exits with `exit_status`; a traceback appears only with
`--debug`.
"""


class DraftlineError(Exception):
    """Base of all errors that are explained to the user in one line."""

    exit_status = 2


class ConfigError(DraftlineError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(DraftlineError):
    """A data file or a row cannot be used."""


class TemplateError(DataError):
    """The chat template is missing, or the answers cannot be located in what it renders."""


class TargetError(DraftlineError):
    """The target cannot be loaded or hooked, or does not fit the drafter."""


class CheckpointError(DraftlineError):
    """A folder is not a checkpoint, is incomplete, or belongs to something else."""


class ExportError(DraftlineError):
    """A drafter cannot be written in the requested format."""


class ServerError(DraftlineError):
    """A server does not answer, speaks another interface, or was started without what is wanted of it."""


class StorageError(DraftlineError):
    """The disk is full or refuses to be written."""


class PipelineError(DraftlineError):
    """A loop of the pipeline failed; the original exception is chained as the cause."""

    exit_status = 1


class UpdateError(PipelineError):
    """The optimiser failed half-way: weights and moments are in doubt and must not be saved."""


class RankError(PipelineError):
    """Another rank of the run has failed, or does not answer.

    Attributes:
        status: with which all ranks exit.
    """

    def __init__(self, message: str, status: int = PipelineError.exit_status) -> None:
        super().__init__(message)
        self.exit_status = status


class AuditRefusal(DraftlineError):
    """The audit found faults of severity error that were not allowed."""

    exit_status = 1


class Interrupted(DraftlineError):
    """The run was interrupted and its state saved."""

    exit_status = 130
