"""A small tokenizer with real merges, and chat templates of the styles that are around."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<start_of_turn>",
    "<end_of_turn>", "[INST]", "[/INST]", "<|head|>", "<|/head|>",
]  # fmt: skip

_CORPUS = [
    "The answer is four. It is what you asked for, and the weather in Paris is fine.\n\n",
    "user assistant system tool: what is the name of the city? def f(x):\n    return x + 1\n",
] * 8

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADER = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Shows reasoning after the last question only, and an empty block there if there is none.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% set c = m.content %}{% set r = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}{% endif %}{{ c }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Adds a system prompt of its own.
WITH_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
# Alters what the user and the assistant wrote.
SHOUTING = CHATML.replace("m['content']", "m['content'] | upper")
# Ends a turn with several tokens.
LONG_END = CHATML.replace("<|im_end|>\\n", "<|end|><|im_end|>\\n")
# Ends the last turn otherwise than earlier ones.
RETURNING = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + ':' + m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant:' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "header": (HEADER, "<|eot|>"),
    "inst": (INST, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "thinking": (THINKING, "<|im_end|>"),
    "with_system": (WITH_SYSTEM, "<|im_end|>"),
    "long_end": (LONG_END, "<|end|><|im_end|>"),
    "marked": (MARKED, "<|im_end|>"),
}
"""Template and turn end by name; none of these alters the texts, except that some trim them."""


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 400 tokens with this chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII is spread over two to four tokens."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built)


def sentencepiece_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """As converted from a SentencePiece model: words begin with a mark that is decoded to a space, except at the start.

    Characters that it does not have are spelt in bytes.
    """
    marks = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    texts = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), *(chr(c) for c in range(33, 127)), "▁", "ï"]
    merges = [("▁", "f"), ("▁f", "o"), ("▁fo", "u"), ("▁fou", "r"), ("I", "t")]
    vocabulary = {text: index for index, text in enumerate([*texts, *("".join(pair) for pair in merges)])}
    built = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(spaces)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer
