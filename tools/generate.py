"""Continue prompts with a trained model, in any layout that its weights can be loaded in.

    torchrun --nproc-per-node 4 tools/generate.py --load checkpoints \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --prompt "To be, or not to be" --max-new-tokens 50 --temperature 0.8 --top-k 50

--load-hf DIRECTORY loads a Hugging Face model, with its tokenizer. The checkpoint determines the
shape of the model. Flags of layout, precision and tokenizer have the same meaning as in
pretrain_gpt.py. Without --temperature the most likely token is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.settings.flags import flag
from megatron.inference.engine import Engine, Request
from megatron.inference.forward import has_cache
from megatron.inference.generate import generate
from megatron.inference.sampling import Sampling
from megatron.inference.session import ModelSession, open_session
from megatron.inference.text import Continuation, continue_texts
from megatron.resilience.failure import failures_reported
from megatron.resilience.status import RunStatus
from megatron.training.launch.printing import is_rank_0
from megatron.training.setup.distributed import shut_down
from pretrain_gpt import model_provider


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """Text generation."""

    prompt: tuple[str, ...] = flag((), is_repeated=True)
    """Text; may be repeated."""
    prompts_file: Path | None = None
    """File with one prompt per line, as text or as JSON objects with a 'prompt'."""
    max_new_tokens: int = 50
    """Tokens added to each prompt."""
    temperature: float = 0.0
    """0 chooses the most likely token."""
    top_k: int = 0
    """Sample among the k most likely tokens."""
    top_p: float = 1.0
    """Sample among the likeliest tokens with this total probability."""
    stop: tuple[str, ...] = flag((), is_repeated=True)
    """Stop before this text."""
    log_probs: int | None = None
    """With --json: log-probabilities of the tokens, and of this many best tokens."""
    max_batch_size: int = 32
    """Prompts processed at once."""
    json: bool = False
    """Write one JSON object per prompt."""
    output: Path | None = None
    """Also write the text to a file."""
    no_weight_packing: bool = False
    """On CPUs: keep no second copy of the weights; slower, half the memory."""


def prompts_of(options: GenerateFlags) -> list[str]:
    """Return the prompts of the command line, then the prompts of the file."""
    prompts = list(options.prompt)
    if options.prompts_file is not None:
        try:
            lines = options.prompts_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{options.prompts_file} cannot be read: {error}.",
                rule="prompts are UTF-8 text, one per line",
                flags=["--prompts-file"],
                fix="name a text file",
            ) from error
        prompts += [
            prompt_of_line(line, number) for number, line in enumerate(lines, 1) if line.strip()
        ]
    if not prompts:
        raise ConfigError(
            "there is no prompt.",
            rule="the model continues at least one prompt",
            flags=["--prompt", "--prompts-file"],
            fix='--prompt "To be, or not to be"',
        )
    return prompts


def prompt_of_line(line: str, number: int) -> str:
    """Return the prompt of a line of text, or of a JSON object in it."""
    if not line.lstrip().startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
        if isinstance(prompt, str):
            return prompt
    except (ValueError, KeyError):
        pass
    raise DataError(
        f"line {number} begins like a JSON object but has no text under 'prompt'.",
        rule="a line is a prompt, or a JSON object with a prompt",
        flags=["--prompts-file"],
        fix='{"prompt": "To be, or not to be"}',
    )


def continuations(
    session: ModelSession[GenerateFlags], prompts: Sequence[Sequence[int]]
) -> list[Continuation]:
    """Continue tokenized prompts: with a key-value cache, if the layout has one."""
    options, tokenizer = session.options, session.tokenizer
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=session.run.schedule.seed,
    )
    if has_cache(session.model):
        longest = max(map(len, prompts)) + options.max_new_tokens
        model = session.with_cache(
            max_rows=min(len(prompts), options.max_batch_size),
            max_length=min(longest, session.max_sequence_length),
            packs_weights=not options.no_weight_packing,
        )
        requests = [
            Request(
                tokens=prompt,
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                sequence=number,
                stop_tokens=session.ends,
                num_top_logprobs=options.log_probs,
            )
            for number, prompt in enumerate(prompts)
        ]
        return continue_texts(Engine(model), requests, tokenizer, options.stop)
    if options.stop or options.log_probs is not None:
        raise ConfigError(
            "stop words or log-probabilities, in a layout whose ranks share the sequence.",
            rule="they need the key-value cache, and this layout has none",
            flags=["--stop", "--log-probs", "--sequence-parallel", "--context-parallel-size"],
            fix="leave out --sequence-parallel and --context-parallel-size",
        )
    rows = generate(
        session.model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        vocab_size=session.vocab_size,
        max_sequence_length=session.max_sequence_length,
        sampling=sampling,
        eod=session.ends,
        pg_collection=session.groups,
    )
    found = []
    for prompt, row in zip(prompts, rows, strict=True):
        new = row[len(prompt) :]
        text = tokenizer.detokenize(row)[len(tokenizer.detokenize(prompt)) :]
        reason = "length" if len(new) == options.max_new_tokens else "stop"
        found.append(Continuation(text, new, reason))
    return found


def described(prompt: str, found: Continuation) -> str:
    """Return the JSON line of a prompt and its continuation."""
    shown: dict[str, object] = {"prompt": prompt, "text": found.text}
    shown |= {"finish_reason": found.finish_reason, "tokens": found.tokens}
    if found.logprobs:
        shown["log_probs"] = [logprobs[0][1] for logprobs in found.logprobs]
        shown["top_log_probs"] = [dict(logprobs[1:]) for logprobs in found.logprobs]
    return json.dumps(shown, ensure_ascii=False)


def main() -> None:
    """Load the model, continue the prompts, print the text."""
    status = RunStatus.of_this_process()
    with failures_reported(status):
        session = open_session(model_provider, GenerateFlags)
        options, tokenizer = session.options, session.tokenizer
        prompts = prompts_of(options)
        found = continuations(session, [tokenizer.tokenize(prompt) for prompt in prompts])
        if is_rank_0():
            pairs = list(zip(prompts, found, strict=True))
            if options.json:
                text = "\n".join(described(prompt, one) for prompt, one in pairs)
            else:
                text = "\n----------\n".join(prompt + one.text for prompt, one in pairs)
            print(text, flush=True)
            if options.output is not None:
                options.output.write_text(text + "\n")
        shut_down()


if __name__ == "__main__":
    main()
