"""GRPO in one file: a tiny model learns two-digit addition from rewards alone, in under a minute on a laptop.

    python examples/minimal_grpo.py

The problems and their scorer are an ordinary Inspect task, arithmetic.py, made into environments by
`inspect_tinker_bridge`. The model sits behind two clients with Tinker's methods: one samples, one trains. No
server, no API key, no network. An episode may have one turn or many, so the loop trains agents as well.

One step of GRPO (Shao et al. 2024, arXiv:2402.03300):
  1. Sample a group of episodes for each of a few problems; the task scores every episode.
  2. An episode's advantage is its reward minus the mean reward of its group, so no value model is needed.
  3. Raise the probability of tokens with a positive advantage and lower the others, with PPO's clipped loss.

Shapes: P problems per step, G episodes per group, T positions in a training sequence.
"""

import argparse
import asyncio
import random
import time
from pathlib import Path

import numpy as np
import tinker
from transformers import AutoTokenizer

from arithmetic import arithmetic
from inspect_tinker_bridge import load_environment
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import model_folder

PROBLEMS = 32  # P
GROUP_SIZE = 8  # G
MINIBATCHES = 4  # optimizer steps per GRPO step
LEARNING_RATE = 3e-4
CLIP = 0.2
MAX_TOKENS = 16  # per turn
EVAL_EPISODES = 512  # before and after
INTERIM_EVAL_EPISODES = 64  # after each step


async def run_episode(env, policy, seed):
    """The agent loop: read a prompt, sample an action at temperature 1, step; the task scores at the end."""
    turns, reward, done = [], 0.0, False
    prompt, stop = await env.initial_observation()
    while not done:
        params = tinker.SamplingParams(max_tokens=MAX_TOKENS, stop=stop, seed=seed + len(turns))
        action = (await policy.sample(prompt, num_samples=1, sampling_params=params)).sequences[0]
        turns.append((prompt, action))
        result = await env.step(action.tokens, extra={"stop_reason": action.stop_reason})
        prompt, stop = result.next_observation, result.next_stop_condition
        reward, done = reward + result.reward, result.episode_done
    return turns, reward


async def run_groups(builders, policy, rng):
    """Run all P * G episodes concurrently; returns the turns of each, and the rewards."""
    try:
        envs = [env for builder in builders for env in await builder.make_envs()]
        episodes = await asyncio.gather(*(run_episode(env, policy, rng.getrandbits(31)) for env in envs))
    finally:
        for builder in builders:
            await builder.cleanup()
    turns, rewards = zip(*episodes, strict=True)
    return turns, np.array(rewards).reshape(len(builders), -1)  # (P, G)


def to_datum(prompt, action, advantage):
    """A turn as a training sequence: position t reads token t and predicts token t + 1.

    The model did not choose the prompt, so positions that predict it have advantage 0 and do not train.
    """
    tokens = np.array(prompt.to_ints() + action.tokens)  # (T + 1,)
    of_prompt = [0.0] * (prompt.length - 1)
    inputs = {
        "target_tokens": tokens[1:],  # (T,)
        "logprobs": np.float32(of_prompt + action.logprobs),  # (T,)
        "advantages": np.float32(of_prompt + [advantage] * len(action.tokens)),  # (T,)
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


async def update(training, turns, rewards, rng):
    """Take one optimizer step per minibatch.

    A token's loss, with r = exp(logprob now - logprob when sampled) and its advantage A, is
    -min(r A, clip(r, 1 - CLIP, 1 + CLIP) A): no gradient once r has moved past the clip range in A's favor.
    """
    clip = {"clip_low_threshold": 1 - CLIP, "clip_high_threshold": 1 + CLIP}
    adam = tinker.AdamParams(learning_rate=LEARNING_RATE, grad_clip_norm=1.0)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)  # (P, G)
    episodes = zip(turns, advantages.flat, strict=True)
    # In a group whose rewards are all equal, every advantage is 0: there is nothing to learn from it.
    batch = [(*turn, advantage) for episode, advantage in episodes for turn in episode if advantage != 0]
    rng.shuffle(batch)
    for i in range(min(MINIBATCHES, len(batch))):
        minibatch = batch[i::MINIBATCHES]
        # The engine sums the loss over tokens; dividing by the number of sequences averages it over those.
        data = [to_datum(*turn, advantage / len(minibatch)) for *turn, advantage in minibatch]
        await training.forward_backward(data, "ppo", clip)
        await training.optim_step(adam)


async def accuracy(builders, policy, rng):
    """The mean reward, which is 1 for a right answer and 0 for a wrong one."""
    return (await run_groups(builders, policy, rng))[1].mean()


async def train(training, train_set, test_set, steps, rng):
    """The training loop; returns the held-out accuracy before and after."""
    start = time.perf_counter()
    policy = await training.save_weights_and_get_sampling_client()
    before = after = await accuracy(test_set.get_batch(0), policy, rng)
    print(f"step  reward  held-out  seconds\n   0          {before:8.3f}  {time.perf_counter() - start:7.1f}")
    for step in range(1, steps + 1):
        turns, rewards = await run_groups(train_set.get_batch(step - 1), policy, rng)  # (P, G)
        await update(training, turns, rewards, rng)
        policy = await training.save_weights_and_get_sampling_client()  # frozen: training does not change it
        held_out = EVAL_EPISODES if step == steps else INTERIM_EVAL_EPISODES
        after = await accuracy(test_set.get_batch(0)[:held_out], policy, rng)
        seconds = time.perf_counter() - start
        print(f"{step:4}  {rewards.mean():6.3f}  {after:8.3f}  {seconds:7.1f}", flush=True)
    return before, after


async def main(steps, seed):
    """Train the tiny model that ships with the package, and save it."""
    folder = model_folder("tiny")
    task = {"task": arithmetic, "env_type": "task", "renderer": "qwen3_instruct"}
    task["tokenizer"] = AutoTokenizer.from_pretrained(folder)
    groups = {"batch_size": PROBLEMS, "num_envs_per_group": GROUP_SIZE, "shuffle": True, "shuffle_seed": seed}
    train_set = load_environment(**task, split="train", **groups)
    # No problem is in both splits. Two epochs, since the test split has fewer problems than EVAL_EPISODES.
    test_set = load_environment(**task, split="test", batch_size=EVAL_EPISODES, num_epochs=2)
    with EmbeddedEngine(folder, checkpoint_dir=Path("runs/minimal_grpo")) as engine:
        training = engine.create_training_client()
        before, after = await train(training, train_set, test_set, steps, random.Random(seed))
        saved = await training.save_state("final")
    print(f"held-out accuracy at temperature 1: {before:.3f} -> {after:.3f}\ncheckpoint: {saved.path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on two-digit addition.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(main(**vars(parser.parse_args())))
