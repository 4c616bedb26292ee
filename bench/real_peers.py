"""The programs that `bench/real.py` compares, each in a process of its own that loads a model once.

    python bench/real_peers.py PEER MODEL [--threads N]

A peer prints `ready`, reads a request a line, and answers each with a line of JSON. Peers that sample answer
`{"rows": R}` with the tokens a second of R replies of `NEW_TOKENS` tokens to R short chats, the processing of
their prompts included. Peers that train answer `{}` with the seconds of one step on eight groups of eight.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

NEW_TOKENS = 64
GROUPS, GROUP_SIZE = 8, 8
PROMPT, REPLIES = 40, (8, 32)
"""Ids of a prompt that trains, and the least and the most of a reply: what sums take."""

LORA_RANK = 16
LEARNING_RATE = 3e-4

Answer = Callable[[dict[str, int]], float]


def prompts(folder: Path, rows: int) -> list[list[int]]:
    """Ids of `rows` different prompts, as the chat template writes them."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = [f"What is {1 + row % 50} + {1 + row // 2}?" for row in range(rows)]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for text in texts
    ]


def sampled_by_us(folder: Path, threads: int) -> Answer:
    import tinker

    from tinkerscript.engine.embedded import EmbeddedEngine

    engine = EmbeddedEngine(folder, checkpoint_dir=Path("/nonexistent"), threads=threads)
    training = engine.create_training_client()

    def answer(request: dict[str, int]) -> float:
        # A new client each time: prompts of the round before are forgotten.
        client = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=NEW_TOKENS, stop=[], temperature=1.0)
        ids = prompts(folder, request["rows"])
        began = time.perf_counter()
        futures = [client.sample(tinker.ModelInput.from_ints(each), 1, params) for each in ids]
        tokens = sum(len(future.result().sequences[0].tokens) for future in futures)
        return tokens / (time.perf_counter() - began)

    return answer


def sampled_by_transformers(folder: Path, threads: int) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def answer(request: dict[str, int]) -> float:
        rows = prompts(folder, request["rows"])
        began = time.perf_counter()
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        return len(rows) * NEW_TOKENS / (time.perf_counter() - began)

    return answer


def sampled_by_vllm(folder: Path, threads: int) -> Answer:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),
    }
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    # Prompts of the round before are forgotten.
    model: Any = LLM(str(folder), dtype="float32", max_model_len=512, enable_prefix_caching=False)

    def answer(request: dict[str, int]) -> float:
        ids = [{"prompt_token_ids": row} for row in prompts(folder, request["rows"])]
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True)
        began = time.perf_counter()
        replies = model.generate(ids, params, use_tqdm=False)
        tokens = sum(len(each.outputs[0].token_ids) for each in replies)
        return tokens / (time.perf_counter() - began)

    return answer


def write_float32(source: Path, target: Path) -> None:
    """Copy a GGUF file with tensors in float32: the weights that transformers reads from it."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sampled_by_llama_cpp(folder: Path, threads: int) -> Answer:
    import llama_cpp  # pyright: ignore[reportMissingImports]
    from fetch import download  # pyright: ignore[reportMissingImports]

    cpp: Any = llama_cpp
    most = 64
    cpp.llama_backend_init()
    # It logs to standard error through a callback, which has to stay alive.
    quiet = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(quiet, None)
    settings = cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "float32.gguf"
        write_float32(download(Path(name)), file)
        model = cpp.llama_model_load_from_file(str(file).encode(), settings)
    context_settings = cpp.llama_context_default_params()
    context_settings.n_ctx = most * 256
    context_settings.n_batch = context_settings.n_ubatch = 4096
    context_settings.n_seq_max = most
    context_settings.n_threads = context_settings.n_threads_batch = threads
    context_settings.kv_unified = True
    context_settings.type_k = context_settings.type_v = 0  # float32
    context = cpp.llama_init_from_model(model, context_settings)
    sampler = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
    cpp.llama_sampler_chain_add(sampler, cpp.llama_sampler_init_dist(1))

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows: a token, its position, its sequence, and whether its logits are wanted."""
        batch = cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wanted
        if cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        cpp.llama_batch_free(batch)

    def answer(request: dict[str, int]) -> float:
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        ids = prompts(folder, request["rows"])
        began = time.perf_counter()
        fed = [
            (token, position, sequence, position == len(row) - 1)
            for sequence, row in enumerate(ids)
            for position, token in enumerate(row)
        ]
        decode(fed)
        ends = np.cumsum([len(row) for row in ids]) - 1
        latest = [cpp.llama_sampler_sample(sampler, context, int(at)) for at in ends]
        for number in range(1, NEW_TOKENS):
            decode([(token, len(ids[row]) + number - 1, row, True) for row, token in enumerate(latest)])
            latest = [cpp.llama_sampler_sample(sampler, context, row) for row in range(len(ids))]
        return len(ids) * NEW_TOKENS / (time.perf_counter() - began)

    return answer


def groups(vocabulary: int) -> list[list[tuple[np.ndarray, int, float]]]:
    """Each sequence of a group: its ids [T + 1], how many of them were sampled, and its advantage."""
    rng = np.random.default_rng(0)
    found = list[list[tuple[np.ndarray, int, float]]]()
    for _ in range(GROUPS):
        prompt = rng.integers(0, vocabulary, PROMPT)
        lengths = rng.integers(*REPLIES, GROUP_SIZE, endpoint=True)
        found.append(
            [
                (np.concatenate([prompt, rng.integers(0, vocabulary, n)]), int(n), float(rng.normal()))
                for n in lengths
            ]
        )
    return found


def trained_by_us(folder: Path, threads: int) -> Answer:
    import tinker
    from transformers import AutoConfig

    from tinkerscript.engine.embedded import EmbeddedEngine
    from tinkerscript.engine.weights import LoraSettings

    lora = LoraSettings(LORA_RANK)
    engine = EmbeddedEngine(folder, checkpoint_dir=Path("/nonexistent"), threads=threads, lora=lora)
    client = engine.create_training_client()
    data = list[tinker.Datum]()
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    for ids, sampled, advantage in chain.from_iterable(groups(vocabulary)):
        length = len(ids) - 1
        advantages = np.zeros(length, np.float32)
        advantages[-sampled:] = advantage
        inputs = {
            "target_tokens": ids[1:].astype(np.int64),
            "logprobs": np.full(length, -10.0, np.float32),
            "advantages": advantages,
        }
        data.append(
            tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)
        )

    def answer(_: dict[str, int]) -> float:
        began = time.perf_counter()
        client.forward_backward(data, "importance_sampling").result()
        client.optim_step(tinker.AdamParams(learning_rate=LEARNING_RATE, grad_clip_norm=1.0)).result()
        return time.perf_counter() - began

    return answer


def trained_by_peft(folder: Path, threads: int) -> Answer:
    """As one would write it: a padded batch for each group, the logits of the replies only, torch's AdamW."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, settings)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    data = groups(base.config.vocab_size)

    def backward(group: list[tuple[np.ndarray, int, float]]) -> None:
        width, longest = max(len(ids) for ids, _, _ in group), max(n for _, n, _ in group)
        ids, seen = torch.zeros(len(group), width, dtype=torch.long), torch.zeros(len(group), width)
        counts = torch.zeros(len(group), longest)
        for row, (tokens, sampled, _) in enumerate(
            group
        ):  # Padded on the left, so that replies end together.
            ids[row, -len(tokens) :] = torch.from_numpy(tokens)
            seen[row, -len(tokens) :] = 1
            counts[row, -sampled:] = 1
        # One more than the reply: the logits at its last token predict what is not there.
        found = model(input_ids=ids, attention_mask=seen, use_cache=False, logits_to_keep=longest + 1)
        targets = ids[:, -longest:]
        logprobs = found.logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        advantages = torch.tensor([advantage for _, _, advantage in group])[:, None]
        (-((logprobs + 10.0).exp() * advantages * counts).sum()).backward()

    def answer(_: dict[str, int]) -> float:
        began = time.perf_counter()
        for group in data:
            backward(group)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return answer


PEERS: dict[str, Callable[[Path, int], Answer]] = {
    "ours": sampled_by_us,
    "transformers": sampled_by_transformers,
    "vllm": sampled_by_vllm,
    "llama.cpp": sampled_by_llama_cpp,
    "ours-training": trained_by_us,
    "peft-training": trained_by_peft,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model", type=Path, help="the folder of fetch.py")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    # Libraries print; answers go where only they go.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer = PEERS[options.peer](options.model, options.threads)
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
