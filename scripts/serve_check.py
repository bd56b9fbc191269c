"""Serve a drafter in real programs, and compare every answer with Draftline's own decoder.

    python scripts/serve_check.py --target tiny --source quickstart/run --prompts quickstart/heldout.jsonl \
        --vllm .venv-vllm/bin/python --out serve-check

`make serve-check` builds the environment and calls this. Compared are the output tokens and the number of forwards of
the target, answer by answer, in float32: a wrong mask moves a mean acceptance by 2 %, but it moves counts on most
answers. Clients: vLLM in process and as a server, both with both export formats, and llama.cpp's server where one is
given; each server is also asked by `draftline verify`. Exit status 1 if a client gives another output (but for ties) or
another count on more than one answer in 20, or if a server is not found to serve what was trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from rich.console import Console
from rich.table import Table

from draftline.commands.evaluate import drafter_for, evaluate_at_server, evaluate_drafter
from draftline.commands.verify import verify_folder
from draftline.config import TargetConfig
from draftline.data.prompts import read_prompts
from draftline.data.server import Endpoint
from draftline.evaluate.generate import tie_gap
from draftline.formats.exporting import export_drafter
from draftline.options import EvaluationSettings, ExportSettings, ServerMeasurement
from draftline.targets.model import Target, load_target, save_target

SCRIPTS = Path(__file__).resolve().parent
FORMATS: tuple[Literal["zlab", "speculators"], ...] = ("zlab", "speculators")
TIE = 1e-3
"""Distance of two logits within which forwards over one token and over a block may choose differently in float32."""

VLLM_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Without these, spinning threads cost vLLM on a CPU a factor of ten."""

LLAMA_ENVIRONMENT = {"LLAMA_ARG_THREADS": "1"}
"""Its threads spin too."""


@dataclass(frozen=True)
class Row:
    """One client: on how many answers it agrees with Draftline, and its forwards over all.

    Attributes:
        verdict: of `draftline verify`, yes or no; None for clients that are not a server.
    """

    client: str
    answers: int
    same_output: int
    same_forwards: int
    forwards: int
    expected: int
    ties: list[str]
    verdict: bool | None = None

    @property
    def good(self) -> bool:
        """Whether all outputs are equal or ties, at most one answer in 20 took other forwards, and no verdict is no."""
        wanted = self.answers - self.answers // 20
        same = self.same_output + len(self.ties) >= self.answers and self.same_forwards >= wanted
        return same and self.verdict is not False


@dataclass(frozen=True)
class Check:
    """What every client is compared with.

    Attributes:
        limit: prompts of the file; a prompt may have several turns, and each is compared.
        reference: `per_prompt` of an evaluation in process, from the exported folder.
    """

    target: Target
    target_folder: Path
    prompts: Path
    limit: int
    max_new_tokens: int
    reference: list[dict[str, Any]]
    out: Path

    def row(self, client: str, turns: Sequence[dict[str, Any]]) -> Row:
        """Compare a client's turns, each with `output_ids` and `target_forwards`."""
        ties = []
        for number, (ours, theirs) in enumerate(zip(self.reference, turns, strict=True), start=1):
            if ours["output_ids"] != theirs["output_ids"]:
                input_ids = torch.tensor([ours["input_ids"]])
                token, gap = tie_gap(self.target, input_ids, ours["output_ids"], theirs["output_ids"])
                print(f"{client}: output {number} differs from token {token}, logit gap {gap:.2g}", file=sys.stderr)
                ties += [f"output {number}, token {token}, gap {gap:.2g}"] if gap < TIE else []
        pairs = list(zip(self.reference, turns, strict=True))
        return Row(
            client,
            len(pairs),
            sum(ours["output_ids"] == theirs["output_ids"] for ours, theirs in pairs),
            sum(ours["target_forwards"] == theirs["target_forwards"] for ours, theirs in pairs),
            sum(theirs["target_forwards"] for theirs in turns),
            sum(ours["target_forwards"] for ours in self.reference),
            ties,
        )

    def at_server(self, client: str, url: str, drafter: Path) -> Row:
        """Measure a running server as `draftline evaluate --base-url` does, and ask it as `draftline verify` does."""
        wanted = ServerMeasurement(model=None, max_new_tokens=self.max_new_tokens, concurrency=(1,))
        config = TargetConfig(name=str(self.target_folder))
        asked = read_prompts([str(self.prompts)], self.limit)
        result = evaluate_at_server(Endpoint(url), config, asked, wanted)
        verdict = verify_folder(drafter, Endpoint(url))
        print(f"{client}: {verdict.sentence()}", file=sys.stderr)
        return replace(self.row(client, result.to_json()["per_prompt"]), verdict=verdict.served_as_trained)


def main() -> int:
    words = _arguments()
    words.out = words.out.resolve()
    words.out.mkdir(parents=True, exist_ok=True)
    target = load_target(TargetConfig(name=words.target, dtype="float32"))
    folder = words.out / "target"
    shutil.rmtree(folder, ignore_errors=True)
    save_target(target, folder)
    commands = {form: _export(words.source, words.out / form, target, folder, form) for form in FORMATS}
    drafter = drafter_for(target, words.out / "zlab")
    asked = read_prompts([str(words.prompts)], words.limit)
    evaluation = evaluate_drafter(target, drafter, asked, EvaluationSettings(max_new_tokens=words.max_new_tokens))
    assert evaluation.greedy_equal == 1.0, f"Draftline's own outputs differ: {evaluation.differences}"
    reference = words.out / "reference.json"
    reference.write_text(json.dumps(evaluation.to_json()) + "\n", encoding="utf-8")
    turns = evaluation.to_json()["per_prompt"]
    check = Check(target, folder, words.prompts, words.limit, words.max_new_tokens, turns, words.out)
    drafted = drafter.config.num_speculative_tokens
    rows = []
    for form in FORMATS if words.vllm else ():
        rows.append(_in_process(check, words.vllm, form, drafted, reference))
        _show(rows)
        rows.append(_vllm_server(check, words.vllm, form, commands[form]))
        _show(rows)
    rows += _llama_server(check, words)
    _show(rows)
    versions = _versions(words.vllm) if words.vllm else {}
    result = {"versions": versions, "rows": [{**asdict(row), "good": row.good} for row in rows]}
    (words.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.good for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--source", type=Path, required=True, help="run folder, checkpoint or exported drafter")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vllm-cpu; none: left out")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server; none: that part is left out")
    parser.add_argument("--llama-convert", type=Path, help="its convert_hf_to_gguf.py; default: beside the server")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def _export(source: Path, out: Path, target: Target, folder: Path, form: Literal["zlab", "speculators"]) -> str:
    """The folder for vLLM in one of the formats, and the command that is printed for it."""
    shutil.rmtree(out, ignore_errors=True)
    reader: Literal["vllm", "speculators"] = "speculators" if form == "speculators" else "vllm"
    report = export_drafter(
        source=source,
        out=out,
        target=target,
        settings=ExportSettings(reader=reader, dtype="float32", target_path=str(folder)),
    )
    return report.command


def _in_process(check: Check, python: Path, form: str, drafted: int, reference: Path) -> Row:
    decoded = check.out / f"vllm-{form}.json"
    command = [python, SCRIPTS / "vllm_decode.py", "--fix", "--target", check.target_folder]
    command += ["--draft", check.out / form, "--drafted", str(drafted), "--evaluation", reference]
    command += ["--limit", str(len(check.reference)), "--out", decoded]
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with (check.out / f"vllm-{form}.log").open("w") as log:
        subprocess.run([str(word) for word in command], env=environment, stdout=log, stderr=log, check=True)
    return check.row(f"vLLM in process, {form} format", json.loads(decoded.read_text(encoding="utf-8"))["turns"])


def _vllm_server(check: Check, python: Path, form: str, printed: str) -> Row:
    """The printed command, except that `vllm` is its fixed self; eagerly, because compiling takes minutes on a CPU."""
    words = shlex.split(printed.replace("\\\n", " "))
    assert words[:2] == ["vllm", "serve"], printed
    command = [str(python), str(SCRIPTS / "vllm_fix.py"), *words[1:], "--enforce-eager"]
    with _serving(command, check.out / f"vllm-server-{form}.log", {**os.environ, **VLLM_ENVIRONMENT}) as url:
        return check.at_server(f"vLLM server, {form} format", url, check.out / form)


def _llama_server(check: Check, words: argparse.Namespace) -> list[Row]:
    """Convert and serve the z-lab export by the printed commands; nothing where there is no build."""
    if words.llama_server is None:
        print("llama.cpp is left out: name a build of its server with LLAMA_SERVER=path", file=sys.stderr)
        return []
    server = words.llama_server.resolve()
    convert = (words.llama_convert or server.parent / "convert_hf_to_gguf.py").resolve()
    folder = check.out / "llama.cpp"
    shutil.rmtree(folder, ignore_errors=True)
    report = export_drafter(
        source=check.out / "zlab",
        out=folder,
        target=check.target,
        settings=ExportSettings(reader="llama.cpp", dtype="float32", target_path=str(check.target_folder)),
    )
    commands = [shlex.split(line) for line in report.command.replace("\\\n", " ").splitlines()]
    with (check.out / "llama-convert.log").open("w") as log:
        for command in commands[:-1]:
            assert command[:2] == ["python", "convert_hf_to_gguf.py"], command
            converter = [sys.executable, str(SCRIPTS / "llama_convert.py"), str(convert)]
            subprocess.run([*converter, *command[2:]], cwd=check.out, stdout=log, stderr=log, check=True)
    environment = {**os.environ, **LLAMA_ENVIRONMENT}
    with _serving([str(server), *commands[-1][1:]], check.out / "llama-server.log", environment, check.out) as url:
        return [check.at_server("llama.cpp server, z-lab format", url, folder)]


@contextmanager
def _serving(
    command: list[str], log_file: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[str]:
    """Run a server on loopback, in a folder, until it is healthy, give its address, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    print(shlex.join(command), file=sys.stderr)
    with log_file.open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}/health", log_file)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=120)


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}: see {log_file}")
        try:
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(2.0)


def _versions(python: Path) -> dict[str, str]:
    query = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('vllm-cpu', 'torch')}))"
    found = subprocess.run([str(python), "-c", query], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def _show(rows: Sequence[Row]) -> None:
    table = Table("client", "outputs equal", "forwards equal", "forwards", "of Draftline", "ties", "verify")
    for row in rows:
        outputs, equal = f"{row.same_output} of {row.answers}", f"{row.same_forwards} of {row.answers}"
        verdict = "" if row.verdict is None else "yes" if row.verdict else "no"
        table.add_row(row.client, outputs, equal, str(row.forwards), str(row.expected), "; ".join(row.ties), verdict)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
