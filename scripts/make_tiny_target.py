"""Train the embedded target: a Qwen3-architecture model of 2.5 million parameters that answers `tiny_corpus` tasks.

    python scripts/make_tiny_target.py --out draftline/assets/tiny            # train and write every file
    python scripts/make_tiny_target.py --out draftline/assets/tiny --report   # measure the model that is there

The model exists so that Draftline can run its whole job without a download. It has eight layers, so that five
different layers can be captured and two more follow the last of them; a tokenizer shorter than its embedding table,
so that a padding row can serve as the mask token; answers that are easy in their wording and hard in their values.

Matrices are trained with Muon, which needs about half the tokens that AdamW needs here; embedding and norms with
AdamW. Everything is seeded; training takes about 25 minutes on one core.
"""

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tiny_corpus
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TRAIN_SEED, PROMPT_SEED, REPORT_SEED = 1, 2, 3
TOKENIZER_SIZE, TABLE_SIZE = 1000, 1024
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The pre-tokenizer of Qwen2: converters recognise it, and it splits numbers into single digits.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(out: Path) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on the corpus, write its files, and load them as a user would."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for conversation in tiny_corpus.conversations(TRAIN_SEED, 20_000)
        for turn in conversation.turns
        for text in (turn.user, turn.answer)
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(out)


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=TABLE_SIZE,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(TRAIN_SEED)
    return Qwen3ForCausalLM(config)


def encode(conversation: tiny_corpus.Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation in the chat format, and which of them the model has to say."""
    ids: list[int] = []
    mask: list[bool] = []
    for turn in conversation.turns:
        asked = f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n"
        for text, said in ((asked, False), (f"{turn.answer}<|im_end|>", True), ("\n", False)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [said] * len(piece)
    return ids, mask


def batches(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids_BS, labels_BS) with about `tokens` positions each, of conversations of similar length.

    Right padding: a causal model needs no attention mask for it. Labels are -100 where nothing is to be said.
    """
    rng = random.Random(TRAIN_SEED)
    for chunk in range(1_000_000):
        drawn = tiny_corpus.conversations(TRAIN_SEED * 1_000_000 + chunk, 2_000)
        rows = sorted((encode(conversation, tokenizer) for conversation in drawn), key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            ids_BS = torch.full((len(group), length), tokenizer.pad_token_id)
            labels_BS = torch.full((len(group), length), -100)
            for index, (ids, mask) in enumerate(group):
                ids_BS[index, : len(ids)] = torch.tensor(ids)
                labels_BS[index, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
            yield ids_BS, labels_BS


def answer_loss(model: Qwen3ForCausalLM, ids_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the answers; the head is applied where it counts only."""
    states_BSD = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
    wanted_BS = labels_BS[:, 1:] >= 0
    logits_NV = model.lm_head(states_BSD[:, :-1][wanted_BS])
    return functional.cross_entropy(logits_NV, labels_BS[:, 1:][wanted_BS])


def optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
    """Cosine schedule with a short warm-up; a checkpoint in `options.out` every `options.save_every` steps."""
    model.train()
    steppers = optimizers(model, options.rate)
    started, seen = time.time(), 0
    for step, (ids_BS, labels_BS) in zip(range(options.steps), batches(tokenizer, options.tokens), strict=False):
        warm = min(1.0, (step + 1) / 50)
        factor = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / options.steps)))
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = options.rate * factor
        loss = answer_loss(model, ids_BS, labels_BS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        seen += ids_BS.numel()
        if step % 50 == 0:
            print(
                f"step {step} loss {loss.item():.4f} tokens {seen} seconds {time.time() - started:.0f}",
                flush=True,
            )
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(model, options.out)


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the weights in bfloat16 beside the tokenizer."""
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.do_sample = False
    copy.to(torch.bfloat16).save_pretrained(out)


def write_prompts(out: Path, count: int) -> None:
    lines = (json.dumps({"turns": turns}) for turns in tiny_corpus.prompts(PROMPT_SEED, count))
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n")


@dataclass
class Tally:
    """Sums of the report: divided only when printed."""

    answers: int = 0
    ended: int = 0
    checked: int = 0
    correct: int = 0
    tokens: int = 0


@torch.no_grad()
def greedy(model: Qwen3ForCausalLM, ids: list[int], limit: int) -> list[int]:
    output = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=limit, do_sample=False
    )
    return output[0, len(ids) :].tolist()


@torch.no_grad()
def agreeing_layers(model: Qwen3ForCausalLM, ids: list[int], said: list[bool]) -> torch.Tensor:
    """How often each layer's output, through norm and head, already gives the final prediction; shape [layers].

    Counted at the positions that predict the answers' tokens. The states are read with hooks on the layers, because
    the last entry of `output_hidden_states` is taken after the norm.
    """
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[2])) for layer in model.model.layers]
    logits_SV = model(input_ids=torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    places = torch.tensor(said[1:]).nonzero()[:, 0]
    final = logits_SV[places].argmax(-1)
    return torch.stack([(model.lm_head(model.model.norm(o[0, places])).argmax(-1) == final).sum() for o in outputs])


def report(out: Path, count: int) -> None:
    """Let the saved model answer `count` fresh conversations greedily and print what was measured."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tallies: dict[str, Tally] = defaultdict(Tally)
    agreed, positions = torch.zeros(model.config.num_hidden_layers), 0
    for conversation in tiny_corpus.conversations(REPORT_SEED, count):
        ids: list[int] = []
        said: list[bool] = []
        for turn in conversation.turns:
            asked = f"<|im_start|>user\n{turn.user}<|im_end|>\n<|im_start|>assistant\n"
            asked_ids = tokenizer.encode(asked if not ids else f"\n{asked}", add_special_tokens=False)
            ids += asked_ids
            said += [False] * len(asked_ids)
            answer = greedy(model, ids, 250)
            ids += answer
            said += [True] * len(answer)
            tally = tallies[conversation.kind]
            tally.answers += 1
            tally.tokens += len(answer)
            tally.ended += answer[-1] == tokenizer.eos_token_id
            tally.checked += turn.key != ""
            tally.correct += turn.key != "" and turn.key in tokenizer.decode(answer)
        agreed += agreeing_layers(model, ids, said)
        positions += sum(said)
    print_report(tallies, agreed / positions)


def print_report(tallies: dict[str, Tally], shares: torch.Tensor) -> None:
    """Two Markdown tables, ready for the model card."""
    print("| task | answers | tokens per answer | ended | correct |\n|---|---|---|---|---|")
    total: Counter[str] = Counter()
    for kind, tally in tallies.items():
        total.update(vars(tally))
        correct = f"{tally.correct / tally.checked:.0%}" if tally.checked else "free text"
        ended = f"{tally.ended / tally.answers:.0%}"
        print(f"| {kind} | {tally.answers} | {tally.tokens / tally.answers:.0f} | {ended} | {correct} |")
    print(
        f"| all | {total['answers']} | {total['tokens'] / total['answers']:.0f} | "
        f"{total['ended'] / total['answers']:.1%} | {total['correct'] / total['checked']:.1%} |\n"
    )
    print("| layer | share of answer positions that already give the final prediction |\n|---|---|")
    for layer, share in enumerate(shares.tolist()):
        print(f"| {layer} | {share:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="train or measure the embedded target")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model's files")
    parser.add_argument("--report", action="store_true", help="measure the model in --out instead of training")
    parser.add_argument("--count", type=int, default=400, help="conversations of the report")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=4096, help="positions in a batch")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    options = parser.parse_args()
    if options.report:
        report(options.out, options.count)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(options.out)
    write_prompts(options.out, 1500)
    train(build_model(tokenizer), tokenizer, options)


if __name__ == "__main__":
    main()
