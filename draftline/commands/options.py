"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from draftline.outputs import new_folder, new_json, new_page

TargetName = Annotated[str, typer.Option("--target", help="tiny, smollm2, a local Hugging Face folder or a hub name.")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_HELP = "auto: float32 on CPU, else as stored."
TargetDtype = Annotated[DtypeName, typer.Option("--target-dtype", help=DTYPE_HELP)]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that ships with the target.")]
Recipe = Annotated[str | None, typer.Option("--recipe", help="published (the default), small-model or quickstart.")]
MaybeTrust = Annotated[bool | None, typer.Option("--trust-remote-code", help="Run code that ships with the target.")]
InitFrom = Annotated[Path | None, typer.Option("--init-from", help="A drafter of any trainer, to train further.")]
ReaderName = Literal["zlab", "vllm", "sglang", "llama.cpp", "speculators"]
DraftFolder = Annotated[Path, typer.Option("--draft", help="Exported drafter, checkpoint or run folder.")]
BaseUrl = Annotated[str | None, typer.Option("--base-url", help="A running server, up to and with /v1.")]
ServerModel = Annotated[str | None, typer.Option("--model", help="The target's name on the server.")]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="Environment variable with the server's key; else OPENAI_API_KEY.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="1 keeps all.")]
TopK = Annotated[int, typer.Option(help="0 keeps all.")]
Seed = Annotated[int, typer.Option(help="Of sampling.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, tokens.")]

Out = Annotated[
    Path, typer.Option("--out", callback=new_folder, help="Folder to write; it must not exist or be empty.")
]
AnchorPredicts = Annotated[
    bool | None,
    typer.Option("--sample-from-anchor/--no-sample-from-anchor", help="Whether slot 0 predicts, if nothing says so."),
]
JsonOut = Annotated[
    Path | None, typer.Option("--json", callback=new_json, help="Also write the result as JSON to this file.")
]

HtmlOut = Annotated[Path | None, typer.Option("--html", callback=new_page, help="Also write a page to this file.")]
