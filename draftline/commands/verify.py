"""`draftline verify`: is a drafter served as it was trained?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftline.config import read_api_key
from draftline.errors import CheckpointError, ConfigError
from draftline.options import VerifyCommand
from draftline.progress import counting
from draftline.storage import write_json

if TYPE_CHECKING:
    from draftline.data.server import Endpoint
    from draftline.evaluate.served import Question, Verdict


def verify(options: VerifyCommand) -> int:
    """Ask a running server the prompts of a drafter's proof: exit status 0 served as trained, 1 not, 2 not asked."""
    from draftline.data.server import Endpoint

    server = options.server
    if server.base_url is None:
        raise ConfigError("nothing says which server to ask: give --base-url, up to and with /v1")
    endpoint = Endpoint(server.base_url, read_api_key(server.api_key_env))
    verdict = verify_folder(options.folder, endpoint, server.model, options.limit)
    print(verdict.sentence())
    write_json(options.json_file, verdict.to_json())
    return 0 if verdict.served_as_trained else 1


def verify_folder(folder: Path, endpoint: Endpoint, model: str | None = None, limit: int | None = None) -> Verdict:
    """Ask a running server the prompts of the proof in a drafter's folder, or the first `limit` of them.

    Args:
        model: its name on the server; none: the first that it serves.

    Raises:
        CheckpointError: the folder has no proof that can be used, or is not what the proof is about.
        ServerError: the server does not answer, or cannot be compared.
    """
    from draftline.evaluate.served import verify_server

    question = question_of(folder, limit)
    with counting("prompts") as on_answer:
        return verify_server(endpoint, model, question, on_answer)


def question_of(folder: Path, limit: int | None = None) -> Question:
    """What the proof of a folder asks; raises as `verify_folder`."""
    from draftline.evaluate.served import Question
    from draftline.formats.files import read_files
    from draftline.formats.proof import read_proof, tensor_differences

    proof = read_proof(folder)
    if proof is None:
        raise CheckpointError(f"{folder} has no proof, as folders of other programs and older ones: export it again")
    edited = tensor_differences(proof, read_files(folder)).lines
    if edited:
        raise CheckpointError(f"{folder} is not what was exported ({edited[0]}): take that, or export it again")
    precision = proof.precision
    return Question(
        answers=proof.answers[:limit],
        max_new_tokens=proof.decoding.max_new_tokens,
        stop_token_ids=proof.decoding.stop_token_ids,
        vocab_size=None if proof.tokenizer is None else proof.tokenizer.vocab_size,
        coarse=not precision.target_dtype == precision.drafter_dtype == "float32",
    )
