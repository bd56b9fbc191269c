"""Train the embedded target: a Qwen3-architecture model of 2.5 million parameters that answers `tiny_corpus` tasks.

    python scripts/make_tiny_target.py --out draftline/assets/tiny            # train and write every file
    python scripts/make_tiny_target.py --out draftline/assets/tiny --report   # measure the model that is there

The model exists so that Draftline can run its whole job without a download. It has eight layers, so that five
different layers can be captured and two more follow the last of them; a tokenizer shorter than its embedding table,
so that a padding row can serve as the mask token; answers that are easy in their wording and hard in their values.

Matrices are trained with Muon, embedding and norms with AdamW. Everything is seeded. A batch of 2,048 positions takes
about 0.5 seconds on a free core; the model card of the output folder says which runs made the shipped weights.
"""

import argparse
import json
import math
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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
REPORT_BATCH, ANSWER_LIMIT = 64, 250
EARLY_LAYER, EARLY_WEIGHT = 5, 0.2  # the last layer that a default choice of five captured layers reads
TOKENIZER_SIZE, TABLE_SIZE = 1000, 1024
PROMPT_FORMAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
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
        for text, said in ((PROMPT_FORMAT.format(turn.user), False), (f"{turn.answer}<|im_end|>", True), ("\n", False)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [said] * len(piece)
    return ids, mask


def batches(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids_BS, labels_BS) with about `tokens` positions each, of conversations of similar length.

    Right padding: a causal model needs no attention mask for it. Labels are -100 where nothing is to be said.
    """
    rng = random.Random(seed)
    for chunk in range(1_000_000):
        drawn = tiny_corpus.conversations(seed * 1_000_000 + chunk, 2_000)
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


def answer_loss(
    model: Qwen3ForCausalLM, ids_BS: torch.Tensor, labels_BS: torch.Tensor, early_share: float
) -> torch.Tensor:
    """Cross-entropy over the answers, plus the early-reading penalty; the head is applied where it counts only."""
    captured: list[torch.Tensor] = []
    hook = model.model.layers[EARLY_LAYER].register_forward_hook(lambda *call: captured.append(call[2]))
    states_BSD = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
    hook.remove()
    wanted_BS = labels_BS[:, 1:] >= 0
    labels_N = labels_BS[:, 1:][wanted_BS]
    loss = functional.cross_entropy(model.lm_head(states_BSD[:, :-1][wanted_BS]), labels_N)
    return loss + early_penalty(model, captured[0][:, :-1][wanted_BS], labels_N, early_share)


def early_penalty(
    model: Qwen3ForCausalLM, states_ND: torch.Tensor, labels_N: torch.Tensor, early_share: float
) -> torch.Tensor:
    """Unlikelihood of the labels as read from the states of EARLY_LAYER, while more than `early_share` read right.

    In a model this small the residual stream holds the prediction long before the end; in large ones the last
    layers still turn it. Without this, targets taken from the last captured layer (a known silent fault) would be
    nearly right. Norm and head are read as constants: only the layers up to EARLY_LAYER are pushed.
    """
    norm = model.model.norm
    normed_ND = functional.rms_norm(states_ND, norm.weight.shape, norm.weight.detach(), norm.variance_epsilon)
    logits_NV = functional.linear(normed_ND, model.lm_head.weight.detach())
    if (logits_NV.argmax(-1) == labels_N).float().mean() <= early_share:
        return logits_NV.new_zeros(())
    chance_N = logits_NV.softmax(-1).gather(1, labels_N[:, None])
    return -EARLY_WEIGHT * torch.log1p(-chance_N.clamp(max=0.99)).mean()


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
    for step, (ids_BS, labels_BS) in zip(
        range(options.steps), batches(tokenizer, options.tokens, options.seed), strict=False
    ):
        warm = min(1.0, (step + 1) / 50)
        factor = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / options.steps)))
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = options.rate * factor
        loss = answer_loss(model, ids_BS, labels_BS, options.early_share)
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
def greedy(model: Qwen3ForCausalLM, asked: list[list[int]]) -> list[list[int]]:
    """Greedy answers to a left-padded batch of token ids, each cut after its stop token (or at ANSWER_LIMIT)."""
    length, pad, stop = max(map(len, asked)), model.config.pad_token_id, model.config.eos_token_id
    ids_BS = torch.tensor([[pad] * (length - len(ids)) + ids for ids in asked])
    mask_BS = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in asked])
    output_BS = model.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=ANSWER_LIMIT, do_sample=False)
    answers = output_BS[:, length:].tolist()
    return [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in answers]


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


@dataclass
class Dialogue:
    """A conversation as the model has held it so far: its tokens, and which of them the model said."""

    conversation: tiny_corpus.Conversation
    ids: list[int] = field(default_factory=list)
    said: list[bool] = field(default_factory=list)

    def extend(self, ids: list[int], said: bool) -> None:
        self.ids += ids
        self.said += [said] * len(ids)


def answer_turn(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, dialogues: list[Dialogue], turn: int
) -> Iterator[tuple[Dialogue, list[int]]]:
    """Ask turn number `turn` of every dialogue that has one, and yield the answers."""
    for dialogue in dialogues:
        asked = ("\n" if turn else "") + PROMPT_FORMAT.format(dialogue.conversation.turns[turn].user)
        dialogue.extend(tokenizer.encode(asked, add_special_tokens=False), said=False)
    for start in range(0, len(dialogues), REPORT_BATCH):
        group = dialogues[start : start + REPORT_BATCH]
        for dialogue, answer in zip(group, greedy(model, [d.ids for d in group]), strict=True):
            dialogue.extend(answer, said=True)
            yield dialogue, answer


def report(out: Path, count: int) -> None:
    """Let the saved model answer `count` fresh conversations greedily and print what was measured."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    dialogues = [Dialogue(conversation) for conversation in tiny_corpus.conversations(REPORT_SEED, count)]
    tallies: dict[str, Tally] = defaultdict(Tally)
    for turn in range(max(len(d.conversation.turns) for d in dialogues)):
        active = [d for d in dialogues if len(d.conversation.turns) > turn]
        for dialogue, answer in answer_turn(model, tokenizer, active, turn):
            tally, key = tallies[dialogue.conversation.kind], dialogue.conversation.turns[turn].key
            tally.answers += 1
            tally.tokens += len(answer)
            tally.ended += answer[-1] == tokenizer.eos_token_id
            tally.checked += key != ""
            tally.correct += key != "" and key in tokenizer.decode(answer)
    agreed = sum(agreeing_layers(model, dialogue.ids, dialogue.said) for dialogue in dialogues)
    print_report(tallies, agreed / sum(sum(dialogue.said) for dialogue in dialogues))


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
    parser.add_argument("--start", type=Path, help="folder of an earlier model to train on, with its tokenizer")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training conversations")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=2048, help="positions in a batch")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument(
        "--early-share", type=float, default=1.0, help="penalise layer 5 while it is right more often than this"
    )
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    options = parser.parse_args()
    if options.report:
        report(options.out, options.count)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.start:
        tokenizer = AutoTokenizer.from_pretrained(options.start)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(options.start / name, options.out / name)
        model = Qwen3ForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer(options.out)
        model = build_model(tokenizer)
    write_prompts(options.out, 1500)
    train(model, tokenizer, options)


if __name__ == "__main__":
    main()
